"""bench_scaling.sh on CPU ranks: every row is measured, left out or failed, and the tables show it."""
import json
import shutil
import subprocess
import sys
import unittest

from harness import BIN, SOURCE, Cli, main


@unittest.skipUnless(shutil.which("mpirun"), "no mpirun here")
class Scaling(Cli):
    def bench(self, *args):
        return subprocess.run(
            [SOURCE / "scripts/bench_scaling.sh", "--build", BIN.parent, "--device", "cpu",
             "--quick", "--out", self.dir, *args], capture_output=True, text=True, timeout=300)

    def rows(self, *args):
        result = self.bench(*args)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        lines = (self.dir / "results.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], result.stdout

    def test_every_part(self):
        rows, _ = self.rows("--gpus", "1,4", "--lengths", "64")
        self.assertEqual({r["status"] for r in rows}, {"ok", "measured"}, rows)
        self.assertEqual({r["part"] for r in rows},
                         {"links", "modes", "attention", "easycontext", "weak"})
        self.assertEqual({r["mode"] for r in rows if r["part"] == "modes"},
                         {"data_parallel", "ulysses", "zigzag_ring", "dist_flash", "usp:2x2"})
        for r in rows:
            if r["status"] == "ok":
                self.assertGreater(r["tokens_per_s"], 0)
                self.assertLess(r["error"] if r["gpus"] > 1 else 0, 1e-5)
        # A row measured again replaces the first; the speed-up of one GPU is one.
        table = subprocess.run([sys.executable, SOURCE / "scripts/plot_scaling.py", self.dir, "--text"],
                               capture_output=True, text=True, check=True).stdout
        for words in ["peer-copy", "modes: llama:d2x256", "usp:2x2", "1.00   100%"]:
            self.assertIn(words, table)

    def test_what_does_not_fit_or_fails_is_a_row(self):
        rows, out = self.rows("--gpus", "1", "--memory", "0.001", "modes", "weak")
        self.assertEqual({r["status"] for r in rows}, {"left out"})
        self.assertIn("needs 0.0", rows[0]["reason"])
        self.assertIn("left out: needs", out)
        rows, _ = self.rows("--gpus", "2", "weak", "--", "--save-dir", "/dev/null/x")
        self.assertEqual(rows[-1]["status"], "failed", rows[-1])

    def test_wrong_usage(self):
        for args in [["--gpus", "0"], ["--steps", "1"], ["--memory"], ["ops"], ["--device", "tpu"]]:
            with self.subTest(args=args):
                result = self.bench(*args)
                self.assertEqual(result.returncode, 64, result.stderr)
                self.assertTrue(result.stderr.startswith("error: "), result.stderr)
                self.assertEqual(result.stderr.count("\n"), 1, result.stderr)


class PlayedRanks(Cli):
    """One process, no mpirun: ranks that share a device and compute in turn."""

    def bench(self, name, *args):
        return subprocess.run([BIN / name, *args], capture_output=True, text=True, timeout=300)

    def test_computing_alone(self):
        result = self.bench("bench_seq", "--play", "3", "--mode", "zigzag_ring,dist_flash",
                            "--seq", "97", "--repeats", "1")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("the ranks compute in turn", result.stdout)
        rows = [line.split() for line in result.stdout.splitlines() if " dp 1 x " in line]
        self.assertEqual([row[0] for row in rows], ["zigzag_ring", "dist_flash"])
        for row in rows:
            self.assertEqual(row[13], "-")  # no exchange is timed
            self.assertGreater(float(row[14]), 0)  # MB sent, once, to compare the results
            self.assertLess(float(row[16]), 1e-5)

    def test_links_need_ranks_of_their_own(self):
        for result in (self.bench("bench_seq", "--play", "2", "--threads", "2"),
                       self.bench("bench_comm", "--play", "2")):
            self.assertEqual(result.returncode, 64, result.stdout)
            self.assertIn("--play", result.stderr)


if __name__ == "__main__":
    main()
