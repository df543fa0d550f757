"""What a Python on another host is given with `-c`: small programs that look before they run what was copied there.

They pass through the login shell of a user, which may be no POSIX one: fish takes a backslash between quotes for its own, and
tcsh ends a quoted word at a new line. So they are one line each of what no shell looks at.
"""

import base64

# Runs a program only if its bytes are those that were copied; old enough Python for hosts that are too old, which it tells.
_STARTER = """\
import hashlib, json, runpy, sys
def say(status):
    print(json.dumps({"autotuner": status, "python": sys.version.split()[0]}))
    sys.exit(1)
if sys.version_info < (3, 10):
    say("old")
path, wanted = sys.argv[1:3]
try:
    with open(path, "rb") as f:
        found = hashlib.sha256(f.read()).hexdigest()
except OSError:
    say("missing")
if found != wanted:
    say("damaged")
sys.argv = [path] + sys.argv[3:]
runpy.run_path(path, run_name="__main__")
"""

# Whether a Python can run the load client, and whether that is there and whole.
_PROBE = """\
import hashlib, sys
def look():
    if sys.version_info < (3, 11):
        return "it is Python " + sys.version.split()[0] + ", and 3.11 is needed"
    try:
        import pydantic
    except ImportError:
        return "it has no pydantic"
    try:
        with open(sys.argv[1], "rb") as f:
            return "ready" if hashlib.sha256(f.read()).hexdigest() == sys.argv[2] else "missing"
    except OSError:
        return "missing"
print(look())
"""


def _plain(program: str) -> str:
    return f'import base64;exec(base64.b64decode("{base64.b64encode(program.encode()).decode()}"))'


STARTER = _plain(_STARTER)
PROBE = _plain(_PROBE)
