#!/usr/bin/env python3
"""Writes the novels of Debian's package r-cran-janeaustenr as text files, without R.

The package holds six novels as R character vectors (one element a line) in R's lazy-load database:
Rdata.rdx is a compressed, serialized index {name: (offset, length)}, Rdata.rdb the compressed,
serialized vectors. R's serialization is a simple tagged format (R Internals, section 1.8); the few
types that occur here are read below.

  read_r_strings.py --output DIR              the installed package, or apt-get download
  read_r_strings.py FILE.deb|FOLDER --output DIR
"""
import argparse
import bz2
import lzma
import pathlib
import struct
import subprocess
import sys
import tempfile
import zlib

PACKAGE = "r-cran-janeaustenr"
INSTALLED = pathlib.Path("/usr/lib/R/site-library/janeaustenr")


class Error(Exception):
    """Something in the input is not as expected."""


class Reader:
    """R's serialization format, versions 2 and 3, big-endian ("X\\n")."""

    def __init__(self, data):
        self.data, self.at, self.references = data, 0, []

    def take(self, n):
        if n < 0 or self.at + n > len(self.data):
            raise Error("the R data ends early")
        self.at += n
        return self.data[self.at - n:self.at]

    def integer(self):
        return struct.unpack(">i", self.take(4))[0]

    def length(self, size):
        n = self.integer()
        if n < 0 or n * size > len(self.data) - self.at:
            raise Error(f"an R vector of {n} elements does not fit the data")
        return n

    def value(self):
        if self.take(2) != b"X\n":
            raise Error("not R data in binary form")
        version = self.integer()
        self.take(8)  # R versions of writer and reader
        if version == 3:
            self.take(self.integer())  # name of the native encoding
        elif version != 2:
            raise Error(f"R serialization version {version}, known are 2 and 3")
        return self.item()

    def item(self):
        flags = self.integer()
        kind, has_attributes, has_tag = flags & 0xFF, flags & 0x200, flags & 0x400
        if kind == 254:  # NULL
            return None
        if kind == 255:  # a reference to a symbol seen before
            return self.references[(flags >> 8 or self.integer()) - 1]
        if kind == 1:  # symbol
            symbol = self.item()
            self.references.append(symbol)
            return symbol
        if kind == 2:  # pairlist: attributes, tag, value, rest
            pairs = []
            while kind == 2:
                if has_attributes:
                    self.item()
                tag = self.item() if has_tag else None
                pairs.append((tag, self.item()))
                flags = self.integer()
                kind, has_attributes, has_tag = flags & 0xFF, flags & 0x200, flags & 0x400
            if kind != 254:
                raise Error("an R pairlist does not end in NULL")
            return dict(pairs)
        if kind == 9:  # one string
            n = self.integer()
            if n == -1:
                return ""  # NA
            encoding = "latin-1" if (flags >> 12) & 4 else "utf-8"
            return self.take(n).decode(encoding)
        if kind in (10, 13):  # logical, integer
            values = [self.integer() for _ in range(self.length(4))]
        elif kind in (16, 19):  # strings, list
            values = [self.item() for _ in range(self.length(4))]
        else:
            raise Error(f"R type {kind} is not expected here")
        attributes = self.item() if has_attributes else {}
        names = (attributes or {}).get("names")
        return dict(zip(names, values)) if names else values


def unpack(block):
    """One block of Rdata.rdb: its size (big-endian), perhaps a letter for the method, data."""
    size, body = struct.unpack(">I", block[:4])[0], block[4:]
    methods = {b"2": bz2.decompress, b"Z": lzma.decompress, b"0": bytes}
    if body[:1] in methods:
        data = methods[body[:1]](body[1:])
    else:
        data = zlib.decompress(body)
    if len(data) != size:
        raise Error(f"a block of the R database has {len(data)} bytes, {size} were promised")
    return data


def read_novels(folder):
    """{name: list of lines} of the lazy-load database in `folder`."""
    index_file, database_file = folder / "Rdata.rdx", folder / "Rdata.rdb"
    index = Reader(zlib.decompress(index_file.read_bytes(), 47)).value()  # zlib or gzip
    database = database_file.read_bytes()
    novels = {}
    for name, (offset, length) in sorted(index["variables"].items()):
        value = Reader(unpack(database[offset:offset + length])).value()
        if isinstance(value, list) and value and isinstance(value[0], str):
            novels[name] = value
    if not novels:
        raise Error(f"{folder}: no text inside")
    return novels


def find_data(path):
    """The folder with Rdata.rdb under `path`."""
    for found in sorted(pathlib.Path(path).rglob("Rdata.rdb")):
        if "janeaustenr" in found.parts:
            return found.parent
    if (pathlib.Path(path) / "Rdata.rdb").exists():
        return pathlib.Path(path)
    raise Error(f"{path}: no Rdata.rdb of janeaustenr inside; give the package or its folder")


def read_deb(deb):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg", "-x", str(deb), folder], check=True)
        return read_novels(find_data(folder))


def read_source(source):
    if source:
        path = pathlib.Path(source)
        if not path.exists():
            raise Error(f"{path}: not there; check the path")
        return read_deb(path) if path.suffix == ".deb" else read_novels(find_data(path))
    if (INSTALLED / "data" / "Rdata.rdb").exists():
        return read_novels(INSTALLED / "data")
    with tempfile.TemporaryDirectory() as folder:
        # apt drops its privileges when it downloads: the folder must let it in.
        pathlib.Path(folder).chmod(0o755)
        command = ["apt-get", "download", PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        debs = list(pathlib.Path(folder).glob("*.deb"))
        if done.returncode != 0 or not debs:
            raise Error(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}; "
                        "give the .deb as an argument")
        return read_deb(debs[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="the .deb, or a folder it was unpacked to")
    parser.add_argument("--output", required=True, help="folder for one .txt per novel")
    options = parser.parse_args()
    try:
        novels = read_source(options.source)
        output = pathlib.Path(options.output)
        output.mkdir(parents=True, exist_ok=True)
        for name, lines in novels.items():
            text = "\n".join(lines) + "\n"
            (output / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")
            print(f"{output / name}.txt: {len(text.encode())} bytes, {len(lines)} lines")
    except (Error, OSError, zlib.error, lzma.LZMAError, UnicodeDecodeError, KeyError, ValueError,
            IndexError, TypeError, struct.error, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
