"""Add to the site what is not a page of docs: the root's pages, links out of docs, and formulas.

mkdocs calls the functions by their names. Pages stay readable on their own: links are relative to
the file, and go to the root's pages (SECURITY.md) or to code; here the first become pages of the
site, README.md its first one, and the second plain names, since a site has no code. A link to
nothing is a warning, which is an error where mkdocs is strict.
"""

import html
import logging
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
#: Pages of the root, with their names in the site.
ROOT_PAGES = {name: name for name in ("CONTRIBUTING.md", "SECURITY.md")} | {"README.md": "index.md"}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*(\\[(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages."""
    for name, site_name in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, site_name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs to the site's pages; leave the name of what the site lacks."""
    source = page.file.src_uri
    of_root = source in ROOT_PAGES.values()
    folder = ROOT if of_root else ROOT / "docs" / Path(source).parent

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = Path(os.path.normpath(folder / target))
        if "://" in target or not (of_root or ROOT / "docs" not in path.parents):
            return found[0]
        if not path.exists():
            _log.warning("%s links to %s, which is not there", source, target)
        if path.parent == ROOT and path.name in ROOT_PAGES:
            path = ROOT / "docs" / ROOT_PAGES[path.name]
        if ROOT / "docs" in path.parents:
            here = ROOT / "docs" / Path(source).parent
            return f"[{text}]({os.path.relpath(path, here)}{anchor})"
        return text

    return _LINK.sub(link, markdown)


def on_page_content(content: str, **_: Any) -> str:
    r"""Write formulas as MathML, which browsers draw without a script, and `|` in tables' code.

    A cell's code has `\|` for it, which GitHub reads as `|` and Python's Markdown leaves. A list of
    values is broken behind it where it is too long for a line, and not within a word.
    """

    def mathml(found: re.Match[str]) -> str:
        tex = html.unescape(found[3]).strip()
        return str(convert(tex, display="block" if found[1] == "div" else "inline"))

    content = _CELL.sub(lambda cell: cell[0].replace("\\|", "|<wbr>"), content)
    return _FORMULA.sub(mathml, content)
