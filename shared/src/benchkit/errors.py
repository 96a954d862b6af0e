"""The one exception that a command line turns into one line."""


class UserError(Exception):
    """Something the user can mend: the message says what was expected, what was received and what to do.

    A command line prints it on one line and exits with status 2; a library caller catches it like any other.
    """
