#!/bin/sh
# Installs autotuner as a systemd service. Run it again to upgrade: nothing of yours is overwritten.
#
#   systemd/install.sh                    as root: /opt/autotuner, the unit, the user, the folders, default settings
#   PREFIX=/opt/tuner systemd/install.sh  another place; one that holds bin/autotuner already is used as it is
#   DESTDIR=/tmp/x systemd/install.sh     a dry installation: the files only, below DESTDIR; no root, no network
#   PYTHON=python3.12 systemd/install.sh  the interpreter to make the virtual environment with
#   SERVERS=inherit systemd/install.sh    servers in the daemon's own unit, as on hosts whose polkit is missing or older than 0.106;
#                                         SERVERS=units: in units of their own; default: whichever the host can do
set -eu
umask 022

PREFIX=${PREFIX:-/opt/autotuner}
DESTDIR=${DESTDIR:-}
SERVERS=${SERVERS:-auto}
PYTHON=${PYTHON:-python3}
HERE=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
SOURCE=$(dirname -- "$HERE")
SETTINGS=/etc/autotuner/autotuner.toml
UNITS=/etc/systemd/system
INHERIT=$UNITS/autotuner.service.d/10-servers-inherit.conf

say() { printf '%s\n' "$*"; }
fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

case $PREFIX in
    /*) ;;
    *) fail "PREFIX must be an absolute path, not $PREFIX" ;;
esac
case $PREFIX in
    *[!A-Za-z0-9/._+-]*) fail "PREFIX may hold letters, digits and / . _ + - only: $PREFIX" ;;
esac
case $SERVERS in
    auto | units | inherit) ;;
    *) fail "SERVERS must be units or inherit, not $SERVERS" ;;
esac
if [ -z "$DESTDIR" ] && [ "$(id -u)" -ne 0 ]; then
    fail "must run as root; to see what it would install: DESTDIR=/tmp/autotuner $0"
fi

# Put a file in place as a whole; say whether that changed anything.
put() { # from to mode
    mkdir -p "$DESTDIR$(dirname -- "$2")"
    if cmp -s "$1" "$DESTDIR$2"; then
        say "unchanged $DESTDIR$2"
        return
    fi
    install -m "$3" "$1" "$DESTDIR$2.new"
    mv -f "$DESTDIR$2.new" "$DESTDIR$2"
    say "installed $DESTDIR$2"
}

install_program() {
    if [ -n "$DESTDIR" ]; then
        say "skipped   $PREFIX/bin/autotuner (a dry installation makes no virtual environment)"
        return
    fi
    if [ ! -f "$SOURCE/pyproject.toml" ]; then
        [ -x "$PREFIX/bin/autotuner" ] || fail "no source beside $HERE, and no $PREFIX/bin/autotuner; set PREFIX"
        say "kept      $PREFIX/bin/autotuner"
        return
    fi
    if [ -x "$PREFIX/bin/autotuner" ] && [ ! -f "$PREFIX/.made-by-autotuner" ]; then
        say "kept      $PREFIX/bin/autotuner (an environment that this script did not make)"
        return
    fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$PYTHON is older than Python 3.11; name another with PYTHON=python3.12"
    [ -x "$PREFIX/bin/python" ] || "$PYTHON" -m venv "$PREFIX" ||
        fail "no virtual environment could be made (Debian: apt-get install python3-venv)"
    "$PREFIX/bin/python" -m pip install --quiet --disable-pip-version-check -c "$SOURCE/requirements.lock" "$SOURCE"
    : > "$PREFIX/.made-by-autotuner"
    say "installed $PREFIX/bin/autotuner ($("$PREFIX/bin/autotuner" --version))"
}

make_user() {
    [ -z "$DESTDIR" ] || return 0
    if command -v systemd-sysusers > /dev/null; then
        systemd-sysusers /etc/sysusers.d/autotuner.conf
    elif ! id autotuner > /dev/null 2>&1; then
        useradd --system --home-dir /var/lib/autotuner --shell /usr/sbin/nologin --user-group autotuner
    fi
    say "user      autotuner ($(id autotuner))"
}

make_folders() {
    [ -z "$DESTDIR" ] || return 0
    if command -v systemd-tmpfiles > /dev/null; then
        systemd-tmpfiles --create /etc/tmpfiles.d/autotuner.conf
    else
        install -d -m 0755 /etc/autotuner
        install -d -m 0750 -g autotuner /etc/autotuner/secrets
        install -d -m 0750 -o autotuner -g autotuner /var/lib/autotuner
    fi
    say "folders   /etc/autotuner, /var/lib/autotuner"
}

# The interpreter that the program itself runs under, for the shim in a server's unit.
interpreter() {
    if [ -x "$PREFIX/bin/python" ] || [ ! -f "$PREFIX/bin/autotuner" ]; then
        say "$PREFIX/bin/python"
    else
        sed -n '1s/^#! *\([^ ]*\).*/\1/p' "$PREFIX/bin/autotuner"
    fi
}

# An interpreter in a home folder, or a folder that only root may enter, would fail at the first start; better said now.
check_user_can_run() {
    if [ -n "$DESTDIR" ] || ! command -v setpriv > /dev/null; then
        return
    fi
    as_user "$PREFIX/bin/autotuner" --version > /dev/null 2>&1 ||
        fail "user autotuner cannot run $PREFIX/bin/autotuner: it, its interpreter ($(readlink -f "$PREFIX/bin/python")) or a folder above is closed to it; name a system interpreter with PYTHON=/usr/bin/python3"
    as_user "$(interpreter)" -I -c 'import autotuner.edge.shim' > /dev/null 2>&1 ||
        fail "$(interpreter) does not know autotuner, but must run the shim of each server; set PREFIX to the environment that autotuner is installed in"
}

as_user() {
    setpriv --reuid autotuner --regid autotuner --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
}

put_unit() { # name
    sed -e "s|@PREFIX@|$PREFIX|g" -e "s|@PYTHON@|$(interpreter)|g" "$HERE/$1" > "$FILLED"
    put "$FILLED" "$UNITS/$1" 0644
}

# Whether the daemon can be allowed to start the units of its servers: polkit reads rules in JavaScript from 0.106 on.
polkit_can() {
    command -v pkaction > /dev/null || return 1
    case $(pkaction --version | sed 's/[^0-9]*//') in
        0.10[0-5]* | 0.[0-9] | 0.[0-9][0-9] | '') return 1 ;;
    esac
}

# Where it cannot, servers stay in the daemon's unit, which is opened for them.
choose_servers() {
    if [ "$SERVERS" = auto ]; then
        SERVERS=units
        if [ -z "$DESTDIR" ] && [ -d /run/systemd/system ] && ! polkit_can; then
            SERVERS=inherit
        fi
    fi
    if [ "$SERVERS" = inherit ]; then
        put "$HERE/autotuner-inherit.conf" "$INHERIT" 0644
        say "servers   run in the daemon's own unit, with its sandbox opened (no polkit 0.106 or newer, or you asked for it)"
        return
    fi
    rm -f "$DESTDIR$INHERIT"
    put "$HERE/autotuner.polkit.rules" /etc/polkit-1/rules.d/50-autotuner.rules 0644
    say "servers   run in units of their own, autotuner-server@LAUNCH.service"
}

install_program
FILLED=$(mktemp)
trap 'rm -f "$FILLED"' EXIT
put_unit autotuner.service
put_unit autotuner-server@.service
put_unit autotuner-devices.service
choose_servers
put "$HERE/autotuner.sysusers.conf" /etc/sysusers.d/autotuner.conf 0644
put "$HERE/autotuner.tmpfiles.conf" /etc/tmpfiles.d/autotuner.conf 0644
make_user
make_folders
check_user_can_run
if [ -e "$DESTDIR$SETTINGS" ]; then
    say "kept      $DESTDIR$SETTINGS"
else
    put "$HERE/autotuner.toml" "$SETTINGS" 0644
fi

if [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    say "reloaded  systemd"
elif [ -z "$DESTDIR" ]; then
    say "skipped   systemctl daemon-reload (systemd does not run here)"
fi

say ""
say "Next:"
say "  1. set GPUs, port, benchmark and objective:  \${EDITOR:-vi} $SETTINGS"
say "  2. check them:                               $PREFIX/bin/autotuner validate $SETTINGS"
say "  3. start, now and at each boot:              systemctl enable --now autotuner"
say "     after an upgrade (servers live on):       systemctl try-restart autotuner"
say "  4. work as the service's user:               sudo -u autotuner $PREFIX/bin/autotuner status"
