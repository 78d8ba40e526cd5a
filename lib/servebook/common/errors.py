"""The one kind of error a user is meant to see: what is wrong, where, and what to do, on one line."""


class ServebookError(Exception):
    """Something the user can act on; the command line prints it as one line and exits non-zero.

    what: the fault; where: file, line, key or URL it was found at; fix: what to do about it.
    """

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(self.line())

    def line(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}. {self.fix}" if self.fix else head

    def _render_traceback_(self) -> list[str]:
        """What a notebook's cell shows: the line as well, and no traceback (IPython asks for it by this name)."""
        return [f"{type(self).__name__}: {self.line()}"]


class ServerBusy(ServebookError):
    """The server had no room for one request for as long as it was waited for."""
