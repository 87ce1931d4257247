"""Several ranks under mpirun: the same numbers as one, one line for what goes wrong, no hang."""
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
import unittest

from harness import BIN, Cli, main


@unittest.skipUnless(shutil.which("mpirun"), "no mpirun here")
class Ranks(Cli):
    def setUp(self):
        super().setUp()
        (self.dir / "text.txt").write_text("\n".join(map(str, range(3000))))

    def arguments(self, ranks, *extra):
        return ["--model", "llama:d2x64", "--data", "text.txt", "--seq-length", 40,
                "--micro-batch-size", 2, "--global-batch-tokens", 960, "--steps", 6,
                "--lr-schedule", "constant", "--device", "cpu", "--dtype", "fp64", "--threads", 1,
                "--ranks", ranks, *extra]

    def records(self, folder):
        lines = (self.dir / folder / "log.jsonl").read_text().splitlines()
        return [r for r in map(json.loads, lines) if "loss" in r]

    def losses(self, folder):
        return [(r["loss"], r["grad_norm"]) for r in self.records(folder)]

    def assert_close(self, a, b):
        self.assertEqual(len(a), len(b))
        for x, y in zip(a, b):
            for u, v in zip(x, y):
                self.assertLess(abs(u - v), 1e-10 * abs(u))

    def test_every_mode(self):
        self.succeed(*self.arguments(1, "--log-dir", "one"))
        for mode in ["data_parallel", "ulysses", "ring", "zigzag_ring", "dist_flash", "usp", "auto"]:
            for ranks in [2, 3]:
                with self.subTest(mode=mode, ranks=ranks):
                    folder = f"{mode}_{ranks}"
                    result = self.succeed(*self.arguments(ranks, "--parallel-mode", mode,
                                                          "--log-dir", folder))
                    self.assertEqual(result.stdout.count("step 6/6"), 1, result.stdout)
                    self.assert_close(self.losses("one"), self.losses(folder))

    def test_packed_documents(self):
        # Long documents between short ones: tokens move with every batch, the numbers stay.
        sizes = [90, 2, 2, 2, 3, 2, 60, 2, 3, 1, 2] * 20
        (self.dir / "text.txt").write_text(
            "\n<|endoftext|>\n".join("x" * size for size in sizes))
        def arguments(ranks, *extra):
            args = self.arguments(ranks, "--document-mask", "on", *extra)
            for flag, value in [("--seq-length", 120), ("--global-batch-tokens", 1440)]:
                args[args.index(flag) + 1] = value
            return args
        self.succeed(*arguments(1, "--log-dir", "one"))
        imbalance = {}
        for mode in ["ring", "zigzag_ring", "dist_flash", "usp"]:
            with self.subTest(mode=mode):
                self.succeed(*arguments(4, "--parallel-mode", mode, "--sp", 4, "--log-dir", mode))
                self.assert_close(self.losses("one"), self.losses(mode))
                imbalance[mode] = [r["imbalance"] for r in self.records(mode)]
        for mode in ["zigzag_ring", "usp"]:
            self.assertLess(max(imbalance[mode]), min(imbalance["ring"]))
            self.assertLess(max(imbalance[mode]), 1.15)
        self.assertEqual({r["imbalance"] for r in self.records("one")}, {None})
        # A resumed run places each batch as an undisturbed one does: the same bits.
        half = arguments(4, "--parallel-mode", "zigzag_ring", "--sp", 4, "--log-dir", "again",
                         "--save-dir", "run")
        whole = list(half)
        half[half.index("--steps") + 1] = 3
        self.succeed(*half)
        self.succeed(*whole)
        self.assertEqual(self.losses("again"), self.losses("zigzag_ring"))

    def test_resume_on_another_number_of_ranks(self):
        self.succeed(*self.arguments(1, "--log-dir", "one"))
        half = self.arguments(2, "--log-dir", "two", "--save-dir", "run")
        half[half.index("--steps") + 1] = 3
        self.succeed(*half)
        self.succeed(*self.arguments(3, "--log-dir", "two", "--save-dir", "run"))
        self.assert_close(self.losses("one"), self.losses("two"))

    def test_verify_sp_changes_no_bit(self):
        for mode in ["data_parallel", "zigzag_ring"]:
            with self.subTest(mode=mode):
                run = self.arguments(2, "--parallel-mode", mode, "--log-dir")
                self.succeed(*run, mode)
                checked = self.succeed(*run, mode + "_checked", "--verify-sp")
                lines = [l for l in checked.stdout.splitlines() if l.startswith("--verify-sp: ")]
                self.assertEqual(len(lines), 1, checked.stdout)
                # 6 micro-batches of each rank, or 12: two are enough. 40 tokens divide by 2 x 2 ranks.
                sizes = "4 micro-batches of 2 x 40" if mode == "data_parallel" else \
                    "2 micro-batches of 2 x 39"
                for word in [mode + " on dp", sizes, "fp64", "allowed 1e-10"]:
                    self.assertIn(word, lines[0])
                self.assertEqual(self.losses(mode), self.losses(mode + "_checked"))

    def test_verify_sp_before_a_resume(self):
        run = self.arguments(2, "--parallel-mode", "ulysses", "--log-dir", "a", "--save-dir", "run")
        half = list(run)
        half[half.index("--steps") + 1] = 3
        self.succeed(*half, "--verify-sp")
        result = self.succeed(*run, "--verify-sp")
        self.assertIn("--verify-sp: ulysses on dp 1", result.stdout)
        self.assertIn("resumed from", result.stdout)
        self.succeed(*self.arguments(2, "--parallel-mode", "ulysses", "--log-dir", "b"))
        self.assertEqual(self.losses("a"), self.losses("b"))

    def one_line(self, code, words, *args):
        result = self.run_program(*args)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        lines = [l for l in result.stderr.splitlines() if l.startswith("error: ")]
        self.assertEqual(len(lines), 1, result.stderr)
        for word in words:
            self.assertIn(word, lines[0])

    def test_rank_0_speaks_first(self):
        """Rank 1 keeps silent while a slow launcher has yet to end it."""
        rank_1 = dict(os.environ, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2",
                      OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2")
        with self.assertRaises(subprocess.TimeoutExpired) as ended:
            self.run_program("--steps", "many", env=rank_1, timeout=4)
        self.assertFalse(ended.exception.stderr)

    def test_what_cannot_work(self):
        self.one_line(64, ["--sp", "3"], *self.arguments(2, "--sp", 3))
        self.one_line(64, ["--verify-sp", "--ranks"], *self.arguments(1, "--verify-sp"))
        self.one_line(64, ["--verify-sp", "--ranks"], *self.arguments(0, "--verify-sp"))
        self.one_line(64, ["--global-batch-tokens"],
                      *self.arguments(5, "--parallel-mode", "data_parallel"))
        self.one_line(66, ["nothing.txt"], *self.arguments(2)[:2], "--data", "nothing.txt",
                      *self.arguments(2)[4:])

    def start(self, *extra):
        args = self.arguments(2, "--save-dir", "run", *extra)
        args[args.index("--steps") + 1] = 1000000
        process = subprocess.Popen([BIN / "train_gpt", *map(str, args)], cwd=self.dir, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for line in process.stdout:
            if "step 3/" in line or line.strip().startswith("step       3/"):
                break
        return process, self.pids(process)

    def pids(self, process):
        """mpirun's children that run the program, in order of their rank."""
        ranks = []
        for pid in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                parent = int((pid / "stat").read_text().rsplit(")", 1)[1].split()[1])
                rank = [e for e in (pid / "environ").read_bytes().split(b"\0")
                        if e.startswith(b"OMPI_COMM_WORLD_RANK=")]
            except (OSError, ValueError):
                continue
            if parent == process.pid and rank:
                ranks.append((int(rank[0].split(b"=")[1]), int(pid.name)))
        self.assertEqual(len(ranks), 2)
        return [pid for _, pid in sorted(ranks)]

    def finish(self, process, seconds):
        try:
            return process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            self.fail("the job hangs: " + "".join(process.communicate()))

    def test_a_signal_to_one_rank_saves_and_stops_all(self):
        process, ranks = self.start()
        os.kill(ranks[1], signal.SIGUSR1)
        out, err = self.finish(process, 60)
        self.assertEqual(process.returncode, 75, out + err)
        self.assertEqual(len(list((self.dir / "run").glob("step_*"))), 1)

    def test_a_signal_while_the_other_rank_is_late(self):
        """Rank 0 is held up where it prints, after the step's exchanges: rank 1 then waits in the
        question whether to stop, and has already answered it."""
        os.mkfifo(self.dir / "out")
        pipe = os.open(self.dir / "out", os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
        args = self.arguments(0, "--save-dir", "run", "--log-dir", "log")
        args[args.index("--steps") + 1] = 1000000
        program = [str(BIN / "train_gpt"), *map(str, args)]
        process = subprocess.Popen(
            ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none",
             "-np", "1", "sh", "-c", 'exec "$@" >out', "sh", *program, ":", "-np", "1", *program],
            cwd=self.dir, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        log, size = self.dir / "log" / "log.jsonl", -1
        deadline = time.monotonic() + 60
        while not log.exists() or log.stat().st_size != size:
            self.assertLess(time.monotonic(), deadline, "rank 0 is not held up")
            size = log.stat().st_size if log.exists() else -1
            time.sleep(0.5)
        os.kill(self.pids(process)[1], signal.SIGUSR1)
        time.sleep(0.2)
        os.set_blocking(pipe, True)
        while os.read(pipe, 65536):
            pass
        os.close(pipe)
        out, err = self.finish(process, 60)
        self.assertEqual(process.returncode, 75, out + err)

    def test_a_killed_rank_ends_the_job(self):
        process, ranks = self.start()
        os.kill(ranks[1], signal.SIGKILL)
        self.finish(process, 60)
        self.assertNotEqual(process.returncode, 0)

    def test_a_stopped_rank_ends_the_job_and_is_named(self):
        process, ranks = self.start("--timeout", 5)
        os.kill(ranks[1], signal.SIGSTOP)
        began = time.monotonic()
        _, err = self.finish(process, 90)
        self.assertEqual(process.returncode, 76, err)
        self.assertLess(time.monotonic() - began, 60)
        self.assertIn("rank 1", err)


if __name__ == "__main__":
    main()
