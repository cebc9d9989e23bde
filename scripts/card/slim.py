"""Empties a CUDA library's device code for all cards but one: zeros take no room in an archive.

`python slim.py LIBRARY sm_90 [--drop WORDS]` overwrites, in place, every binary of another architecture, and those in
which each kernel's name holds one of the words (a regular expression). Offsets stay as they are. The driver loads a
binary when one of its kernels is first called, so an emptied one hurts only who calls it.
"""

import argparse
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

# How each region of `.nv_fatbin` starts; its entries follow: code for one architecture each.
REGION = b"\x50\xed\x55\xba"
PTX, CUBIN = 1, 2


def section(library: bytes) -> tuple[int, int]:
    """Where `.nv_fatbin` starts and ends in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    for header in headers:
        name = headers[names][4] + header[0]
        if library[name : library.index(b"\0", name)] == b".nv_fatbin":
            return header[4], header[4] + header[5]
    raise SystemExit("The library has no section .nv_fatbin.")


def regions(library: bytes) -> Iterator[list[tuple[int, int, int, int, int]]]:
    """The entries of each region: kind, architecture, and the payload's start, size and compressed size."""
    start, end = section(library)
    while (start := library.find(REGION, start, end)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", library, start)
        at, stop, entries = start + header, start + header + size, []
        while at < stop:
            kind, _, head, length, packed, _, _, _, arch = struct.unpack_from("<HHIQIIHHI", library, at)
            if not head:
                break
            entries.append((kind, arch, at + head, length, packed))
            at += head + length
        yield entries
        start = max(stop, start + 16)


def kernels(payload: bytes, packed: int) -> list[str]:
    """The names of the kernels in a binary or in PTX, which may be packed with zstd."""
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        payload = subprocess.run(["zstd", "-dc"], input=payload[:packed], capture_output=True, check=True).stdout
    return sorted({name.decode() for name in re.findall(rb"(?:\.text\.|\.entry )(\w+)", payload)})


def slim(library: bytearray, arch: int, drop: re.Pattern[str] | None) -> tuple[int, int]:
    """Empties what the card does not need, in place; returns the bytes kept and emptied."""
    kept = emptied = 0
    for entries in list(regions(library)):
        binary = any(kind == CUBIN and its == arch for kind, its, *_ in entries)
        newest = max((its for kind, its, *_ in entries if kind == PTX and its <= arch), default=None)
        for kind, its, at, length, packed in entries:
            keep = (kind, its) == ((CUBIN, arch) if binary else (PTX, newest))
            if keep and drop:
                names = kernels(bytes(library[at : at + length]), packed)
                keep = not names or not all(drop.search(name) for name in names)
            if keep:
                kept += length
            else:
                library[at : at + length] = bytes(length)
                emptied += length
    return kept, emptied


def main() -> None:
    """Slim the library that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("arch", help="for example sm_90")
    parser.add_argument("--drop", type=re.compile, help="a regular expression that kernels' names are searched for")
    args = parser.parse_args()
    library = bytearray(args.library.read_bytes())
    kept, emptied = slim(library, int(args.arch.removeprefix("sm_")), args.drop)
    args.library.write_bytes(library)
    print(f"{args.library.name}: {kept / 1e6:.1f} MB kept, {emptied / 1e6:.1f} MB emptied")


if __name__ == "__main__":
    main()
