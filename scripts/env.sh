# Sourced by the other scripts: a virtualenv in .venv with the package and the extras asked for.
# PYTHON names the interpreter to build it with.

ensure_env() { # extras
    local extras=$1 python=${PYTHON:-python3} stamp
    if [ ! -x .venv/bin/python ]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "shardpack needs Python 3.11 or later; set PYTHON to one (found: $("$python" --version 2>&1))" >&2
            exit 2
        }
        echo "making a virtualenv in .venv"
        "$python" -m venv .venv
    fi
    # Installed once for each state of pyproject.toml, so that a second run is quick.
    stamp=.venv/.installed-$extras-$(cksum <pyproject.toml | cut -d' ' -f1)
    if [ ! -e "$stamp" ]; then
        echo "installing shardpack with [$extras] (torch is large: this can take minutes)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
        touch "$stamp"
    fi
}
