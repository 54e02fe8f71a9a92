"""Errors that a user can mend."""


class UserError(Exception):
    """Something the user gave is wrong: a checkpoint, a bag, an image, a parameter.

    The message says what is wrong, where, and what to do. Commands print it without a traceback and exit with 2; the
    policy node refuses the transition with it.
    """
