"""Lines of authorized_keys by which one machine of a run is let into another, and their end. Pure.

Such a line starts one script, the door, in the folder of a run. Without its door a line is dead:
whoever wrote it was killed before it could take it away, and the run is over. Only such lines are
ever removed, whole: what a person or another run put there stays.
"""

DOOR = "door.sh"
RESTRICTED = "restrict,port-forwarding"
"""How the options of such a line begin."""
LABEL_PREFIX = "paceline-"
"""How its comment begins, which is the last word."""


def command_option(folder: str, who: str) -> str:
    """Return the option that starts the door in ``folder``, and nothing else."""
    return f'command="sh {folder}/{DOOR} {who}"'


# The new file is complete before it takes the place of the old: a full disk locks nobody out.
WITHOUT = """without() {
  keys=$(readlink -f -- "$1") && new=$keys.paceline-$$ || return 1
  if cp -p -- "$keys" "$new" && { grep -vxF -f - -- "$keys" > "$new"; [ "$?" -le 1 ]; }; then
    mv -f -- "$new" "$keys" && return 0
  fi
  rm -f -- "$new"
  return 1
}
"""
"""A shell function that takes the lines on its input out of a file of keys, or changes nothing."""

SWEEP = (
    WITHOUT
    + f"""
dead() {{
  while IFS= read -r line || [ -n "$line" ]; do
    case "$line" in
      '{RESTRICTED},'*'command="sh /'*'/{DOOR} '*'" '*' {LABEL_PREFIX}'*)
        door=${{line#*command=\\"sh }}
        [ -e "${{door%%/{DOOR} *}}/{DOOR}" ] || printf '%s\\n' "$line" ;;
    esac
  done < "$1"
}}
sweep() {{
  [ -f "$1" ] || return 0
  left=$(dead "$1")
  [ -z "$left" ] || printf '%s\\n' "$left" | without "$1"
}}
"""
)
"""A shell function that takes dead lines out of a file of keys, if there are any."""
