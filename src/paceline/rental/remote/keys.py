"""The operator's own key for rented machines, made once."""

import shutil
import subprocess
from pathlib import Path

from paceline.core.errors import PreflightError


def ensure_key_pair(public: Path) -> None:
    """Make ``public`` and its private half, without the suffix, unless the private half exists.

    The key has no passphrase, since nobody is asked when a machine must be ended; the directory
    is readable by its owner alone.

    Raises:
        PreflightError: it cannot be made; says what is in the way.
    """
    private = public.with_suffix("")
    if public.exists() and private.exists():
        return
    keygen = shutil.which("ssh-keygen")
    if keygen is None:
        raise PreflightError("there is no ssh-keygen on this computer; install OpenSSH's client")
    try:
        public.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if private.exists():
            argv = [keygen, "-y", "-P", "", "-f", str(private)]
            text = _output_of(argv, private)
            public.write_text(text)
            return
        _output_of(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-C", "paceline", "-f", str(private)], private
        )
    except OSError as exc:
        raise PreflightError(f"cannot make a key pair at {private}: {exc.strerror}") from exc


def _output_of(argv: list[str], private: Path) -> str:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise PreflightError(
            f"ssh-keygen could not use {private}: {done.stderr.strip()[-300:]}; move it away to "
            "have another made"
        )
    return done.stdout
