"""The errors that a user can mend: one sentence that says what is wrong and what to do about it."""


class DecaylabError(Exception):
    """Wrong input or a missing piece. The command line prints the sentence and exits with 2."""

    exit_code = 2


class Diverged(DecaylabError):
    """A loss that is not finite. Records are kept; the command line exits with 3."""

    exit_code = 3
