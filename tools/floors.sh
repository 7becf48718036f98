#!/bin/sh
# The lowest versions that pyproject.toml allows for the server, in an environment of their own (build/floors), and the server's
# tests with them.
set -eu
venv=${VENV:-.venv}
floors=build/floors
uv=$venv/bin/uv
if [ ! -x "$uv" ]; then
    echo "floors: needs uv in $venv (pip install uv into it): pip cannot choose the lowest versions" >&2
    exit 1
fi
if [ ! -e "$floors/.ready" ] || [ pyproject.toml -nt "$floors/.ready" ]; then
    echo "floors: installing the lowest versions into $floors"
    index=${PIP_INDEX_URL:-$("${PYTHON:-python3}" -m pip config get global.index-url 2>/dev/null || true)}
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"; fi
    "$uv" venv -q --clear "$floors"
    "$uv" pip install -q --python "$floors/bin/python" --resolution lowest-direct -e ".[serve]"
    "$uv" pip install -q --python "$floors/bin/python" pytest pytest-xdist hypothesis httpx openai jsonschema
    touch "$floors/.ready"
fi
cd conformance/serve
HYBRID_CONFORMANCE=quick OPENBLAS_NUM_THREADS=1 exec "../../$floors/bin/python" -m pytest -q -n "${JOBS:-2}" --dist worksteal \
    -p no:cacheprovider test_access.py test_calls.py test_fields.py test_openai_client.py test_structured.py test_written.py
