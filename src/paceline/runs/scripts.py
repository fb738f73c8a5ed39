"""What runs on a machine on a run's behalf, as text: plain ``sh``, no Python needed. Pure.

A role belongs to its machine and not to whoever started it: ``start.sh TOKEN`` makes the folder
``state/<slot>/TOKEN``, which is the one moment at which an attempt begins, leaves a supervisor
behind and returns. The supervisor writes down who it is and, when the role ends, its exit status.
``watch.sh TOKEN`` waits for that as often as it is asked to, from wherever; without a token it
waits for the latest attempt.

    state/<slot>/<token>/pid    number, start and boot of the supervisor, and its process group
    state/<slot>/<token>/exit   a link whose target is the exit status: it needs no free block
    state/<slot>/current        the token of the latest attempt
    state/<slot>/ended          there when that attempt has ended
"""

CREDENTIALS_FILE = "credentials.json"
AUTHORITY_FILE = "control-ca.crt"
"""Names below ``secrets`` on a machine: who the role is, and whom it may believe."""
LOG_BYTES_MAX = 64 << 20
"""A log that is longer is set aside when its role is started again."""
LOGS_KEPT = 3
KILLED = 137
"""What a role ended with whose supervisor was killed before it could say."""

BASE = """#!/bin/sh
# Written by paceline; one run's directory is this script's grandparent.
set -u
base=$(cd "$(dirname "$0")/.." && pwd) || exit 126
slot='@SLOT@'
log="$base/logs/$slot.log"
state="$base/state/$slot"
"""

PREPARE = """chmod -R u=rwX,go= "$base/secrets" &&
mkdir -p "$base/work" "$base/logs" "$base/out" "$state"
"""

# A virtual environment that sees what the image has (its torch, say); setup and role find its
# programs first, so that whatever setup installs there wins.
INSTALL = """cd "$base" || exit 126
wheel=$(ls "$base"/wheel/*.whl) || exit 126
have() { [ "$(cat "$base/venv/.paceline" 2>/dev/null)" = "${wheel##*/}" ]; }
if have; then exit 0; fi
{
  python=
  for name in python3 python3.13 python3.12 python3.11 python; do
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    python=$name
    break
  done
  if [ -z "$python" ]; then
    echo 'paceline: this machine has no Python 3.11 or newer; use an image that has one'
    exit 3
  fi
  "$python" -m venv --system-site-packages "$base/venv" || {
    echo 'paceline: this Python cannot make virtual environments (Debian: apt-get install' \
      'python3-venv); use another image, or install Paceline in setup with install_paceline: false'
    exit 3
  }
  "$base/venv/bin/python" -m pip install --disable-pip-version-check --quiet "$wheel" &&
  echo "${wheel##*/}" > "$base/venv/.paceline"
} >> "$log" 2>&1
"""

SETUP = """if [ -d "$base/venv/bin" ]; then PATH="$base/venv/bin:$PATH"; export PATH; fi
cd "$base/work" || exit 126
sh "$base/kit/setup_command.sh" >> "$log" 2>&1
"""

# What a shell starts with & has INT and QUIT ignored; env gives them back where it can. The
# supervisor stays in the session of the command that started it, by which a teardown finds it.
START = """token=$1
mkdir -p "$state" || exit 126
if ! mkdir "$state/$token" 2>/dev/null; then
  [ -d "$state/$token" ] || exit 126
  exit 0
fi
rotate() {
  [ -f "$log" ] || return 0
  [ "$(wc -c < "$log")" -gt @LOG_BYTES_MAX@ ] || return 0
  n=@LOGS_KEPT@
  while [ "$n" -gt 1 ]; do
    [ ! -f "$log.$((n - 1))" ] || mv "$log.$((n - 1))" "$log.$n"
    n=$((n - 1))
  done
  mv "$log" "$log.1"
}
rotate
[ -f "$log" ] || : > "$log"
rm -f "$state/ended"
echo "$token" > "$state/current.new" && mv "$state/current.new" "$state/current" || exit 126
reset=
if env --default-signal=INT,QUIT true 2>/dev/null; then reset='env --default-signal=INT,QUIT'; fi
$reset sh "$base/kit/supervise.sh" "$token" </dev/null >/dev/null 2>&1 &
exit 0
"""

# A signal to the group ends the role, not this script: it stays to report how the role ended.
SUPERVISE = (
    f"""PACELINE_CREDENTIALS="$base/secrets/{CREDENTIALS_FILE}"
authority="$base/secrets/{AUTHORITY_FILE}"
"""
    """PACELINE_OUT="$base/out"
PACELINE_ROUTES="$base/routes.json"
export PACELINE_CREDENTIALS PACELINE_OUT PACELINE_ROUTES
if [ -f "$authority" ]; then PACELINE_CONTROL_CA=$authority; export PACELINE_CONTROL_CA; fi
if [ -d "$base/resume" ]; then PACELINE_RESUME_FROM="$base/resume"; export PACELINE_RESUME_FROM; fi
lease="$base/deadman/lease"
if [ -f "$lease" ]; then PACELINE_LEASE=$lease; export PACELINE_LEASE; fi
if [ -d "$base/venv/bin" ]; then PATH="$base/venv/bin:$PATH"; export PATH; fi
token=$1
mine="$state/$token"
trap : TERM INT HUP
read -r boot < /proc/sys/kernel/random/boot_id
read -r line < "/proc/$$/stat"
set -- ${line##*) }
echo "$$ ${20} $boot $3" > "$mine/pid.new" && mv "$mine/pid.new" "$mine/pid"
if cd "$base/work"; then
  sh "$base/kit/run.sh" >> "$log" 2>&1
  code=$?
else
  code=126
fi
tries=0
[ "$(cat "$state/current")" != "$token" ] || ln -s "$code" "$state/ended"
until ln -s "$code" "$mine/exit" || [ "$tries" -ge 600 ]; do tries=$((tries + 1)); sleep 1; done
"""
)

ALIVE = """read -r boot < /proc/sys/kernel/random/boot_id
# The supervisor of an attempt is believed by number, start and boot: numbers are used again.
is_alive() {
  [ -s "$1/pid" ] || return 1
  read -r pid start kept group < "$1/pid"
  [ "$kept" = "$boot" ] || return 1
  line=
  { read -r line < "/proc/$pid/stat"; } 2>/dev/null
  set -- ${line##*) }
  [ "${20:-}" = "$start" ] && [ "$1" != Z ]
}
"""

WATCH = (
    ALIVE
    + """token=${1:-}
[ -n "$token" ] || read -r token < "$state/current" || exit 126
mine="$state/$token"
idle=0 missing=0
while :; do
  if code=$(readlink "$mine/exit"); then exit "$code"; fi
  if is_alive "$mine"; then missing=0
  else
    missing=$((missing + 1))
    if [ "$missing" -gt 20 ]; then
      echo "paceline: $slot was killed, or its machine was started again" >> "$log"
      [ "$(cat "$state/current")" != "$token" ] || ln -s @KILLED@ "$state/ended" 2>/dev/null
      ln -s @KILLED@ "$mine/exit" 2>/dev/null
      code=$(readlink "$mine/exit")
      exit "${code:-@KILLED@}"
    fi
  fi
  idle=$((idle + 1))
  if [ "$idle" -le 40 ]; then sleep 0.05 2>/dev/null || sleep 1
  else sleep 0.25 2>/dev/null || sleep 1; fi
done
"""
)

STOP = (
    ALIVE
    + """read -r token < "$state/current" 2>/dev/null || exit 0
is_alive "$state/$token" || exit 0
kill -s TERM -- "-$group" 2>/dev/null || kill -s TERM "$pid" 2>/dev/null || true
"""
)


def render_scripts(slot: str, *, run: str, setup: str | None) -> dict[str, str]:
    """Return the scripts of one slot's machine by file name."""
    ours = {
        "prepare.sh": PREPARE,
        "install.sh": INSTALL,
        "setup.sh": SETUP,
        "start.sh": START,
        "supervise.sh": SUPERVISE,
        "watch.sh": WATCH,
        "stop.sh": STOP,
    }
    texts = {
        "@SLOT@": slot,
        "@LOG_BYTES_MAX@": str(LOG_BYTES_MAX),
        "@LOGS_KEPT@": str(LOGS_KEPT),
        "@KILLED@": str(KILLED),
    }
    scripts = {"run.sh": run + "\n", "setup_command.sh": (setup or ":") + "\n"}
    for name, body in ours.items():
        script = BASE + body
        for key, text in texts.items():
            script = script.replace(key, text)
        scripts[name] = script
    return scripts
