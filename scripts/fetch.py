"""A file from the internet, by checksum: the same bytes as ever, or nothing."""
import hashlib
import os
import sys
import urllib.error
import urllib.request


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def fetch(url, checksum, path, otherwise):
    """Writes `url` to `path` unless it is there already; returns `path`. A failure ends the program
    with a line that closes on `otherwise`: what to do instead. Without a checksum (None) whatever
    comes is kept."""
    if os.path.exists(path) and checksum in (None, sha256(path)):
        return path
    print(f"fetching {url}")
    partial = path + ".partial"
    try:
        with urllib.request.urlopen(url, timeout=60) as reply, open(partial, "wb") as out:
            for block in iter(lambda: reply.read(1 << 20), b""):
                out.write(block)
    except (urllib.error.URLError, OSError) as e:
        sys.exit(f"error: {url}: {e}; check the connection, or {otherwise}")
    found = sha256(partial)
    if checksum not in (None, found):
        os.remove(partial)
        sys.exit(f"error: {url}: sha256 is {found}, expected {checksum}; nothing was kept, "
                 f"{otherwise}")
    os.rename(partial, path)
    return path
