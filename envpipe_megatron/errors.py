"""The one base class of errors that a user is meant to read."""


class EnvPipeError(Exception):
    """Bad input or a failed precondition, told as what, which value, and what to do.

    Args:
        what: the thing that is wrong, with where it stands (file, line, option).
        value: the offending value; its repr is shown. Leave it out where there is none.
        remedy: what the user can do about it, as a sentence.
    """

    _NO_VALUE = object()

    def __init__(self, what: str, *, value: object = _NO_VALUE, remedy: str = "") -> None:
        self.what = what
        self.remedy = remedy
        shown = "" if value is self._NO_VALUE else f" (got {value!r})"
        super().__init__(f"{what}{shown}" + (f". {remedy}" if remedy else ""))
