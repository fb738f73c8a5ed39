"""What a machine's ``sh`` is told, as text. Pure: nothing is sent here.

The scripts are for any POSIX shell (dash, bash, busybox) on Linux, and need ``setsid``. A command
is a *job*: a directory on the machine whose making is the one moment at which it starts, so that
a start may be repeated when nobody knows whether it arrived. It runs in a session of its own and
writes into that directory; whoever is connected reads from there by offset. Nothing about it
depends on the connection that started it.

    <jobs>/<id>/out, err    what it printed so far, if anybody wants to know
    <jobs>/<id>/session     number, start and boot of the session's leader
    <jobs>/<id>/keeper      number of the process that waits for its end
    <jobs>/<id>/exit        its exit status, once it has ended

Answers are lines, and output as frames (see ``frames``). What a login script prints before the
first line of ours is not ours.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.errors import UsageError

MACHINE_MARK = "PACELINE_MACHINE_ID"
COMMAND_MARK = "PACELINE_COMMAND_ID"
CHUNK_BYTES = 1 << 20
"""Most output in one frame."""
HEARTBEAT_S = 5
"""A machine that is connected and has nothing to say says so about this often."""
GREETING = "paceline-shell 1"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command on one machine."""

    id: str
    """Lower-case hex that no other command has."""
    machine_id: str
    home: str
    jobs: str
    """Relative to ``home``."""
    command: str
    env: Mapping[str, str]
    keeps_output: bool

    def __repr__(self) -> str:
        return f"Job(id={self.id!r}, machine_id={self.machine_id!r}, env={sorted(self.env)!r})"


def render_job(job: Job, *, may_start: bool, num_out: int, num_err: int) -> str:
    """Return the script that starts ``job`` unless it was started, and follows it to its end.

    It goes to the shell's input, because it holds the values of ``env``. A part of it does
    nothing: the last line is the call.

    Args:
        job: what to run.
        may_start: False follows only, and says so when there is nothing to follow.
        num_out: bytes of its standard output that have arrived already.
        num_err: the same for its standard error.

    Raises:
        UsageError: a name in ``env`` that no shell takes, or a NUL byte.
    """
    texts = {
        "@GREETING@": GREETING,
        "@CHUNK@": str(CHUNK_BYTES),
        "@BEATS@": str(HEARTBEAT_S * 4),
        "@HOME@": shlex.quote(job.home),
        "@JOBS@": shlex.quote(job.jobs),
        "@ID@": job.id,
        "@COMMAND@": shlex.quote(_without_nul("the command", job.command)),
        "@EXPORTS@": _exports(job),
        "@KEEPS@": "yes" if job.keeps_output else "",
        "@MAY_START@": "yes" if may_start else "",
        "@OUT@": str(num_out),
        "@ERR@": str(num_err),
    }
    return fill(_JOB, texts)


def render_end(*, home: str, jobs: str, mark: tuple[str, str], job_id: str, grace_s: float) -> str:
    """Return the script that ends every process of one job, or of all if ``job_id`` is ``*``.

    They are asked by TERM, and after ``grace_s`` killed. The script prints the numbers of those
    that are left when it gives up.
    """
    num_grace = int(grace_s / _END_POLL_S)
    texts = {
        "@GREETING@": GREETING,
        "@HOME@": shlex.quote(home),
        "@JOBS@": shlex.quote(jobs),
        "@PATTERN@": job_id,
        "@MARK@": shlex.quote("=".join(mark)),
        "@NUM_GRACE@": str(num_grace),
        "@NUM_TRIES@": str(num_grace + int(_KILL_S / _END_POLL_S)),
        "@POLL_S@": str(_END_POLL_S),
    }
    return fill(_MEMBERS + _END, texts)


def render_count(*, home: str, jobs: str, mark: tuple[str, str]) -> str:
    """Return the script that prints how many processes carry ``mark`` or belong to a job."""
    texts = {
        "@GREETING@": GREETING,
        "@HOME@": shlex.quote(home),
        "@JOBS@": shlex.quote(jobs),
        "@PATTERN@": "*",
        "@MARK@": shlex.quote("=".join(mark)),
    }
    return fill(_MEMBERS + _COUNT, texts)


def render_look(*, home: str, path: str) -> str:
    """Return the script that says what is at ``path``: directory, file or nothing."""
    texts = {
        "@GREETING@": GREETING,
        "@HOME@": shlex.quote(home),
        "@PATH@": shlex.quote(path),
    }
    return fill(_LOOK, texts)


def render_make(*, home: str, path: str) -> str:
    """Return the script that makes the directory ``path`` and those above it."""
    texts = {
        "@GREETING@": GREETING,
        "@HOME@": shlex.quote(home),
        "@PATH@": shlex.quote(path),
    }
    return fill(_MAKE, texts)


def fill(template: str, texts: Mapping[str, str]) -> str:
    """Put all texts in at once, so that none is looked for inside another."""
    pattern = "|".join(map(re.escape, texts))
    return re.sub(pattern, lambda found: texts[found.group()], template)


def _exports(job: Job) -> str:
    marks = {MACHINE_MARK: job.machine_id, COMMAND_MARK: job.id}
    lines = []
    for name, value in {**job.env, **marks}.items():
        if _NAME.fullmatch(name) is None:
            raise UsageError(f"{name!r} cannot be the name of an environment variable")
        lines.append(f"export {name}={shlex.quote(_without_nul(name, value))}")
    return "\n  ".join(lines)


def _without_nul(what: str, text: str) -> str:
    if "\0" in text:
        raise UsageError(f"{what} holds a NUL byte, which no shell can be given")
    return text


_END_POLL_S = 0.05
_KILL_S = 10

# The keeper is a subshell of this very shell: its argument list shows nothing of the job, and
# without a terminal nobody sends it a hangup. Output goes through pipes, not straight into the
# files, because `> /dev/stderr` in a script would cut a file off. What a shell starts with & has
# INT and QUIT ignored; env gives them back where it can. Files of one short line are written at
# once: one that is not empty is complete. What is left of a session is one grep's to find: a shell
# reads /proc byte by byte, which took longer than all the rest of a short command.
_JOB = """
main() {
  echo '@GREETING@'
  cd @HOME@ 2>/dev/null || { echo 'F no-home'; return; }
  job=@JOBS@/@ID@
  read -r boot < /proc/sys/kernel/random/boot_id
  if [ -n '@MAY_START@' ]; then
    setsid=$(command -v setsid) || { echo 'F no-setsid'; return; }
    [ -d @JOBS@ ] || mkdir -p @JOBS@ || { echo 'F cannot-record'; return; }
    if (umask 077; mkdir "$job") 2>/dev/null; then
      start || { rm -rf "$job"; echo 'F cannot-record'; return; }
    elif [ ! -d "$job" ]; then
      echo 'F cannot-record'; return
    fi
  fi
  [ -d "$job" ] || { echo 'F lost'; return; }
  follow
}

start() {
  if [ -n '@KEEPS@' ]; then
    mkfifo "$job/o" "$job/e" && : > "$job/out" && : > "$job/err" || return 1
  fi
  shell=$(command -v bash || command -v sh)
  reset=
  if env --default-signal=INT,QUIT true 2>/dev/null; then
    reset="$(command -v env) --default-signal=INT,QUIT"
  fi
  keep </dev/null >/dev/null 2>&1 &
  echo "$! $boot" > "$job/keeper"
}

keep() {
  out=/dev/null err=/dev/null
  if [ -n '@KEEPS@' ]; then
    out=$job/o err=$job/e
    { cat "$job/o" >> "$job/out"; : > "$job/o.done"; } &
    { cat "$job/e" >> "$job/err"; : > "$job/e.done"; } &
  fi
  payload >"$out" 2>"$err" &
  leader=$!
  read -r line < "/proc/$leader/stat" && set -- ${line##*) } &&
    echo "$leader ${20} $boot" > "$job/session"
  wait "$leader"
  code=$?
  tries=0
  while [ -n '@KEEPS@' ] && [ "$tries" -lt 25 ] &&
    ! { [ -e "$job/o.done" ] && [ -e "$job/e.done" ]; }; do
    sleep 0.02 || sleep 1
    tries=$((tries + 1))
  done
  echo "$code" > "$job/exit"
}

payload() {
  @EXPORTS@
  exec "$setsid" $reset "$shell" -c @COMMAND@
}

follow() {
  out=@OUT@ err=@ERR@ idle=0 ended= out_max= err_max=
  echo S
  while :; do
    if [ -z "$ended" ] && [ -s "$job/exit" ]; then
      ended=yes
      if [ -n '@KEEPS@' ]; then
        out_max=$(wc -c < "$job/out") err_max=$(wc -c < "$job/err")
      fi
    fi
    moved=
    if [ -n '@KEEPS@' ]; then
      if emit O "$job/out" "$out" "$out_max"; then out=$((out + num)) moved=yes; fi
      if emit E "$job/err" "$err" "$err_max"; then err=$((err + num)) moved=yes; fi
    fi
    if [ -n "$moved" ]; then idle=0; continue; fi
    [ -z "$ended" ] || break
    is_kept || [ -s "$job/exit" ] || { echo 'F lost'; return; }
    nap
  done
  read -r code < "$job/exit"
  echo "X $code"
  read -r answer && [ "$answer" = ok ] && forget
}

is_kept() {
  if [ ! -s "$job/keeper" ]; then [ "$idle" -lt 80 ]; return; fi
  read -r keeper kept < "$job/keeper"
  [ "$kept" = "$boot" ] && kill -0 "$keeper" 2>/dev/null
}

emit() {
  size=${4:-$(wc -c < "$2")}
  num=$((size - $3))
  [ "$num" -gt 0 ] || return 1
  [ "$num" -le @CHUNK@ ] || num=@CHUNK@
  echo "$1 $num"
  tail -c "+$(($3 + 1))" "$2" | head -c "$num"
}

nap() {
  idle=$((idle + 1))
  if [ "$idle" -le 10 ]; then sleep 0.01 2>/dev/null || sleep 1
  elif [ "$idle" -le 40 ]; then sleep 0.05 2>/dev/null || sleep 1
  else sleep 0.25 2>/dev/null || sleep 1; fi
  [ $((idle % @BEATS@)) -ne 0 ] || echo H
}

forget() {
  leader=
  [ ! -e "$job/session" ] || read -r leader start kept < "$job/session"
  if [ -n "$leader" ]; then
    grep -qs "^.*) [A-Za-z] [0-9-]* [0-9-]* $leader " /proc/[0-9]*/stat
    case $? in
      1|2) ;;
      *) rm -f "$job/out" "$job/err" "$job/o" "$job/e"; return;;
    esac
  fi
  rm -rf "$job"
}

main; exit
"""

# Finds what carries the mark, what is in a recorded session, and what descends from either. The
# session of a leader that is gone is believed only for what works below this directory.
_MEMBERS = """
members() {
  live=' ' gone=' ' found=' '
  for file in @JOBS@/@PATTERN@/session; do
    [ -f "$file" ] || continue
    read -r leader start kept < "$file"
    [ "$kept" = "$boot" ] || continue
    line=
    { read -r line < "/proc/$leader/stat"; } 2>/dev/null
    set -- ${line##*) }
    if [ "${20:-}" = "$start" ]; then live="$live$leader "
    elif [ $# -eq 0 ]; then gone="$gone$leader "; fi
  done
  for file in $(grep -slF -- @MARK@ /proc/[0-9]*/environ); do
    pid=${file#/proc/}
    found="$found${pid%%/*} "
  done
  more=yes
  while [ -n "$more" ]; do
    more=
    for file in /proc/[0-9]*/stat; do
      line=
      { read -r line < "$file"; } 2>/dev/null
      pid=${line%% *}
      set -- ${line##*) }
      case "${1:-Z}" in Z|X) continue;; esac
      case "$found" in *" $pid "*) continue;; esac
      case "$found$live" in *" $2 "*) found="$found$pid " more=yes; continue;; esac
      case "$live" in *" $4 "*) found="$found$pid " more=yes; continue;; esac
      case "$gone" in *" $4 "*)
        case "$(readlink "/proc/$pid/cwd")/" in "$here"/*) found="$found$pid " more=yes;; esac;;
      esac
    done
  done
}

main() {
  echo '@GREETING@'
  cd @HOME@ 2>/dev/null || { echo 'F no-home'; return; }
  here=$(pwd -P)
  read -r boot < /proc/sys/kernel/random/boot_id
  work
}
"""

_LOOK = """
main() {
  echo '@GREETING@'
  cd @HOME@ 2>/dev/null || { echo 'F no-home'; return; }
  if [ -d @PATH@ ]; then echo 'N directory'
  elif [ -e @PATH@ ] || [ -L @PATH@ ]; then echo 'N file'
  else echo 'N nothing'; fi
}

main; exit
"""

_MAKE = """
main() {
  echo '@GREETING@'
  cd @HOME@ 2>/dev/null || { echo 'F no-home'; return; }
  if mkdir -p @PATH@; then echo 'N made'; else echo 'F cannot-record'; fi
}

main; exit
"""

_COUNT = """
work() {
  members
  set -- $found
  echo "N $#"
}

main; exit
"""

# Looks twice before it believes that nothing is left, and not while a keeper waits for a command: a
# process that is just becoming another program shows no environment.
_END = """
is_awaited() {
  for file in @JOBS@/@PATTERN@/keeper; do
    [ -s "$file" ] && [ ! -s "${file%keeper}exit" ] || continue
    read -r keeper kept < "$file"
    [ "$kept" != "$boot" ] || ! kill -0 "$keeper" 2>/dev/null || return 0
  done
  return 1
}

work() {
  asked=' ' tries=0 clear=0
  while [ "$tries" -lt @NUM_TRIES@ ]; do
    members
    if [ "$found" = ' ' ] && ! is_awaited; then clear=$((clear + 1)); else clear=0; fi
    [ "$clear" -lt 2 ] || break
    for pid in $found; do
      if [ "$tries" -ge @NUM_GRACE@ ]; then kill -9 "$pid" 2>/dev/null; continue; fi
      case "$asked" in *" $pid "*) ;; *) asked="$asked$pid "; kill "$pid" 2>/dev/null;; esac
    done
    sleep @POLL_S@ 2>/dev/null || sleep 1
    tries=$((tries + 1))
  done
  [ '@PATTERN@' = '*' ] || rm -rf @JOBS@/'@PATTERN@'
  echo "L $found"
}

main; exit
"""
