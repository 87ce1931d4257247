"""Common to the end-to-end tests: run the programs as a user would and look at what they print."""
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.path.abspath(sys.argv.pop(1) if len(sys.argv) > 1 else "build/release/bin"))

TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good fortune, "
        "must be in want of a wife. ") * 60


class Cli(unittest.TestCase):
    """A temporary folder per test, and helpers to run a program in it."""

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="torus_cli_"))
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)

    def run_program(self, *args, program="train_gpt", timeout=120, **kwargs):
        return subprocess.run([BIN / program, *map(str, args)], cwd=self.dir, timeout=timeout,
                              capture_output=True, text=True, **kwargs)

    def succeed(self, *args, **kwargs):
        result = self.run_program(*args, **kwargs)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def fail_with(self, code, words, *args, **kwargs):
        """Exit code `code` and one line on stderr that has all of `words`."""
        result = self.run_program(*args, **kwargs)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        lines = result.stderr.strip().splitlines()
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("error: "), lines[0])
        for word in words:
            self.assertIn(word, lines[0])
        return result

    def shard(self, name, tokens, magic=20240520, version=1, count=None, width=2):
        """Writes a token file with a header that may lie."""
        header = [magic, version, len(tokens) if count is None else count] + [0] * 253
        path = self.dir / name
        path.write_bytes(struct.pack("<256i", *header) +
                         struct.pack(f"<{len(tokens)}{'H' if width == 2 else 'I'}", *tokens))
        return path


def main():
    """Runs the file's tests. Exit code 4, which ctest shows as skipped, when none could run."""
    result = unittest.main(verbosity=1, exit=False).result
    if not result.wasSuccessful():
        sys.exit(1)
    sys.exit(4 if len(result.skipped) >= result.testsRun else 0)
