"""The user-facing error: what is wrong, where, and how to fix it, on one line."""


class ServebookError(Exception):
    """An error that the user can fix. The command line prints it as one line and exits with a non-zero status.

    what: the fault; where: the file, line, key or URL; fix: what to do.
    """

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(self.line())

    def line(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}. {self.fix}" if self.fix else head

    def _render_traceback_(self) -> list[str]:
        """What a notebook cell shows: one line, no traceback. IPython looks this method up by name."""
        return [f"{type(self).__name__}: {self.line()}"]


class ServerBusy(ServebookError):
    """The server had no room for one request for as long as it was waited for."""
