# Shared by the scripts beside this file; source it from bash.
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${HSJOURNAL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hsjournal}
torch_spec=${HSJOURNAL_TORCH:-torch==2.13.0}
python=${HSJOURNAL_PYTHON:-$(command -v python3.11 || command -v python3)}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# torch's CPU build goes in alone and first: as somebody's dependency it may come as several GB of CUDA.
install_torch() { "$1" -m pip install -qq "$torch_spec"; }

# hash_of FILE...: a short digest of the files, the Python and the torch that go into an environment.
hash_of() { { cat "$@"; "$python" --version; echo "$torch_spec"; } | sha256sum | cut -c1-16; }

# cached NAME BUILD FILE...: prints the folder NAME-<hash of FILE...> of the cache, made by `BUILD FOLDER` if it isn't whole.
# It is built in place, since a venv can't be moved; the lock keeps callers apart and the mark says that it is whole.
cached() {
  local name=$1 build=$2 folder
  folder=$cache/$name-$(hash_of "${@:3}")
  mkdir -p "$cache"
  exec 9>"$folder.lock"
  flock 9
  if [[ ! -e $folder/.whole ]]; then
    echo "building $folder (once; kept for the next time)" >&2
    rm -rf "$folder"
    "$build" "$folder" >&2
    touch "$folder/.whole"
  fi
  exec 9>&-
  echo "$folder"
}
