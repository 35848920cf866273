"""Write the table of docs/lookup/options.md from the options of a job; a test compares the two.

python docs/tools/page_options.py
"""

from pathlib import Path

from envpipe_megatron.core.fields import Option
from envpipe_megatron.integrations.options import flag_of
from envpipe_megatron.runtime.job.options import OPTIONS

PAGE = Path(__file__).resolve().parents[1] / "lookup" / "options.md"
HEAD = "| option | default | what |\n| --- | --- | --- |\n"


def row(name: str, option: Option) -> str:
    """Return an option's row of the table; italics where a framework has one level only."""
    words = option.metavar or "|".join(option.words)
    flag = f"`{flag_of(name)} {words}".strip().replace("|", "\\|") + "`"
    return f"| {f'*{flag}*' if option.of_levels else flag} | {option.usual} | {option.help} |\n"


def with_table(text: str) -> str:
    """Return the page's text with the table that the options make."""
    before, head, rest = text.partition(HEAD)
    if not head:
        raise ValueError(f"{PAGE} has no table that begins with {HEAD!r}")
    rows = "".join(row(*item) for item in OPTIONS.items())
    return before + head + rows + "\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
