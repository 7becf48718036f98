#!/bin/sh
# Set-up for `make generate` (setup.sh run), `make serve` (setup.sh serve), `make docs` (setup.sh docs) and `make test` (setup.sh test):
# a virtual environment with the package, and a Vulkan driver. Where no driver answers, Debian's CPU driver is installed if that is allowed;
# otherwise the one command to run is printed and the NumPy device `cpu` is used.
set -eu
want=${1:-run}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
py=$venv/bin/python

if [ ! -x "$py" ]; then
    echo "setup: virtual environment $venv"
    "$python" -m venv --without-pip "$venv" || {
        echo "setup: '$python -m venv' failed; on Debian: apt-get install python3-venv" >&2
        exit 1
    }
fi
case $want in
    test) extras="[test,serve,kernels,perf,docs]" ;;
    docs) extras="[docs]" ;;
    serve) extras="[serve]" ;;
    *) extras="" ;;
esac
mesa=build/mesa-trixie/usr/share/vulkan/icd.d/radeon_icd.json
fetching=""
if [ "$want" = test ] && [ ! -e "$mesa" ] && command -v apt-get >/dev/null; then
    echo "setup: fetching Debian 13's Mesa into build/ (it compiles for gfx1103 with matrix units)"
    "$py" -c 'from hybrid.perf.mesa import fetch; fetch()' >"$venv/mesa.log" 2>&1 & # beside the rest: it needs Python alone
    fetching=$!
    trap 'test -z "$fetching" || kill "$fetching" 2>/dev/null || true' EXIT
    trap 'exit 130' INT TERM
fi
# uv does in 7 seconds what takes a virtual environment's own pip 57, most of which is looking through lists of files: it is
# fetched by the interpreter's pip, or by that of a new environment. pip does what uv cannot, for it may be told of more places.
pip="$py -m pip --disable-pip-version-check"
with_uv() {
    if [ ! -x "$venv/bin/uv" ]; then
        "$python" -m pip --disable-pip-version-check --python "$py" install -q --no-compile uv ||
            { "$py" -m ensurepip --default-pip && $pip install -q --no-compile uv; } || return
    fi
    index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url || true)}
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"; fi
    "$venv/bin/uv" pip install -q --python "$py" pip -e ".$extras"
}
with_pip() { # without byte code: Python keeps that of what it imports, and of 774 MB most is never imported
    $pip --version >/dev/null 2>&1 || "$py" -m ensurepip --default-pip >/dev/null || {
        echo "setup: no pip; on Debian: apt-get install python3-venv" >&2
        exit 1
    }
    $pip install -q --no-compile -e ".$extras"
}
echo "setup: installing the package$extras"
with_uv >"$venv/uv.log" 2>&1 || {
    echo "setup: not with uv ($venv/uv.log), so with pip" >&2
    with_pip
}

driver() { "$py" -c 'import sys; from kernels.vulkan.instance import list_devices; sys.exit(not list_devices())' 2>/dev/null; }
layer() { ls /usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json >/dev/null 2>&1; }

packages=""
driver || packages="mesa-vulkan-drivers libvulkan1"
if [ "$want" = test ]; then
    layer || packages="$packages vulkan-validationlayers"
    command -v g++ >/dev/null || packages="$packages g++"
fi
if [ -n "$packages" ]; then
    root=$([ "$(id -u)" = 0 ] && echo "" || echo "sudo -n")
    command="apt-get install -y --no-install-recommends $packages"
    if command -v apt-get >/dev/null && { [ -z "$root" ] || $root true 2>/dev/null; }; then
        echo "setup: installing Debian packages: $packages"
        { $root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $root $command -qq; } >"$venv/apt.log" 2>&1 ||
            { echo "setup: that failed ($venv/apt.log); run it by hand: $command" >&2; }
    else
        echo "setup: this needs your administrator: $command" >&2
    fi
fi
if driver; then echo vulkan >"$venv/.device"; else
    echo cpu >"$venv/.device"
    echo "setup: no Vulkan driver answers: continuing on the NumPy device 'cpu'" >&2
fi
if [ -n "$fetching" ]; then
    wait "$fetching" || echo "setup: no Mesa of Debian 13 ($venv/mesa.log): the gates of that version are not compared" >&2
    fetching=""
fi
if layer; then echo 1 >"$venv/.validation"; else echo "" >"$venv/.validation"; fi
touch "$venv/.ready"
if [ "$want" != run ]; then touch "$venv/.ready-$want"; fi
if [ "$want" = test ]; then touch "$venv/.ready-serve" "$venv/.ready-docs"; fi
