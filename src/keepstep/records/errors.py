"""Exceptions of keepstep. Each docstring says when it is raised.

Two families matter to a user: errors that end with a certain exit code in a rank (`RankExit`), and ordinary errors that the
command line turns into one line on stderr (`KeepstepError`).
"""

from __future__ import annotations

import sys

from keepstep.records.exits import EXIT_CONFIG, EXIT_FAILURE, EXIT_NUMERICAL, EXIT_USAGE


class KeepstepError(Exception):
    """Base of all errors that name what failed, where, the value seen and the next step."""

    exit_code = EXIT_FAILURE


class ConfigError(KeepstepError):
    """Raised when a flag, key or value given by the user is wrong; names it and the valid ones."""

    exit_code = EXIT_USAGE


class VerificationError(KeepstepError):
    """Raised when bytes do not match what a manifest, checksum or signature says."""


class StorageError(KeepstepError):
    """Raised when a file or folder cannot be written or read (disk full, permission, missing)."""


class ChannelError(KeepstepError):
    """Raised when the side channel refuses a request, is fenced off or times out."""


class RankExit(SystemExit):
    """Raised in a rank to end the process with a code that means something to the launcher.

    It derives from SystemExit so that a training script's `except Exception` cannot turn "do not retry" into a retry.
    The message is printed when the exception is made, because the interpreter prints nothing for SystemExit.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(code)
        self.message = message
        print(f"keepstep: {message}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return self.message


class RefuseToStartError(RankExit):
    """Raised when starting would destroy or ignore something, e.g. step 0 over a checkpoint root with nothing valid."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_CONFIG)


class NumericalError(RankExit):
    """Raised when an observed loss or gradient norm is not finite; a human should look before the job goes on."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_NUMERICAL)
