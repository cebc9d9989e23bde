"""Packs folders of packages, those that run and not what compiles them: `python pack.py OUT.tar.xz ROOT FOLDER...`."""

import sys
import tarfile
from pathlib import Path

LEFT_OUT = {".pyc", ".pyi", ".h", ".hpp", ".cuh", ".cu", ".inl", ".cpp", ".a"}


def main() -> None:
    """Pack the folders, files of one kind beside each other: that packs better."""
    out, root, folders = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    files = [
        file
        for folder in folders
        for file in (root / folder).rglob("*")
        if file.is_file() and file.suffix not in LEFT_OUT
    ]
    with tarfile.open(out, "w:xz", preset=6) as tar:
        for file in sorted(files, key=lambda file: (file.suffix, file.name, file)):
            tar.add(file, file.relative_to(root))
    print(f"{out.name}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
