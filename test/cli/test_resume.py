"""A run that is stopped after k steps and started again equals one that was never stopped: weights,
moments, losses, bit for bit, for every k, across shard ends and an epoch's wrap."""
import json
import os
import signal
import subprocess
import time

from harness import BIN, Cli, main

STEPS = 20


class Resume(Cli):
    def setUp(self):
        super().setUp()
        # Three shards of different length; 22 sequences an epoch, 40 are read: it wraps mid-run.
        for i, n in enumerate([8 * 16 + 5, 3 * 16 + 1, 11 * 16 + 9]):
            self.shard(f"train_{i}.bin", [(7 * j + i * 13 + j * j) % 257 for j in range(n)])

    def train(self, folder, steps, *extra, **kwargs):
        return self.succeed("--model", "gpt2:d2x32", "--tokenizer", "bytes", "--data", "train_*.bin",
                            "--seq-length", 16, "--micro-batch-size", 1,
                            "--global-batch-tokens", 32, "--steps", steps,
                            "--lr-schedule", "constant", "--device", "cpu", "--dtype", "fp32",
                            "--save-dir", folder, "--log-dir", folder, *extra, **kwargs)

    def state(self, folder):
        last = self.dir / folder / f"step_{STEPS:08d}"
        return [(last / f).read_bytes() for f in ("model.safetensors", "optimizer.safetensors")]

    def losses(self, folder):
        lines = (self.dir / folder / "log.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records if "loss" in r]

    def test_every_step(self):
        self.train("straight", STEPS)
        self.assertEqual([s for s, *_ in self.losses("straight")], list(range(1, STEPS + 1)))
        for k in range(1, STEPS):
            with self.subTest(k=k):
                self.train(f"run{k}", k)
                result = self.train(f"run{k}", STEPS)
                self.assertIn(f"resumed from run{k}/step_{k:08d}", result.stdout)
                self.assertEqual(self.state(f"run{k}"), self.state("straight"))
                self.assertEqual(self.losses(f"run{k}"), self.losses("straight"))

    def test_loss_scale_and_bf16_moments(self):
        """As fp16 trains on a GPU: the scale grows every third step; no bit depends on it, and it
        is part of what a resume continues."""
        scaled = ["--loss-scale", "dynamic", "--loss-scale-window", 3]
        self.train("plain", STEPS)
        self.train("scaled", STEPS, *scaled)
        self.assertEqual(self.losses("scaled"), self.losses("plain"))
        scales = [json.loads(line)["loss_scale"] for line in
                  (self.dir / "scaled" / "log.jsonl").read_text().splitlines()]
        self.assertEqual(scales, [65536.0 * 2 ** (step // 3) for step in range(1, STEPS + 1)])
        half = [*scaled, "--moments", "bf16"]
        self.train("half", STEPS, *half)
        self.train("parts", 7, *half)
        self.assertIn("scale 262144", self.train("parts", STEPS, *half).stdout)
        self.assertEqual(self.state("parts"), self.state("half"))
        self.assertEqual(self.losses("parts"), self.losses("half"))
        self.assertNotEqual(self.losses("half"), self.losses("plain"))

    def test_number_of_threads_changes_no_bit(self):
        self.train("one", STEPS, "--threads", 1)
        self.train("two", STEPS, "--threads", 2)
        self.assertEqual(self.state("one"), self.state("two"))

    def test_modes(self):
        self.fail_with(66, ["--resume must"], *self.minimal("a", "--resume", "must"))
        self.succeed(*self.minimal("a"))
        self.fail_with(78, ["--resume never", "a"], *self.minimal("a", "--resume", "never"))
        self.succeed(*self.minimal("a", "--resume", "must"))
        self.fail_with(78, ["model"], *self.minimal("a", "--model", "gpt2:d1x32"))
        self.fail_with(78, ["'fp32'", "'fp64'", "--dtype"], *self.minimal("a", "--dtype", "fp64"))
        self.fail_with(78, ["'fp32'", "'fp32, moments bf16'", "--moments"],
                       *self.minimal("a", "--moments", "bf16"))
        self.fail_with(78, ["data"], *self.minimal("a", "--seed", "7"))

    def minimal(self, folder, *extra):
        args = {"--model": "gpt2:d2x32", "--tokenizer": "bytes", "--data": "train_*.bin",
                "--seq-length": 16, "--micro-batch-size": 1, "--steps": 2, "--device": "cpu",
                "--save-dir": folder, "--dtype": "fp32"}
        args.update(zip(extra[::2], extra[1::2]))
        return [x for pair in args.items() for x in pair]

    def test_signal_saves_and_the_same_command_resumes(self):
        args = self.minimal("s", "--steps", "100000", "--save-every", "100000")
        with subprocess.Popen([BIN / "train_gpt", *map(str, args)], cwd=self.dir, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            for line in process.stdout:
                if "5/100000" in line:
                    break
            os.kill(process.pid, signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 75, out + err)
        self.assertIn("stopped by a signal", out)
        saved = sorted(p.name for p in (self.dir / "s").glob("step_*"))
        self.assertEqual(len(saved), 1)

    def test_two_runs_in_one_folder(self):
        args = self.minimal("s", "--steps", "100000")
        with subprocess.Popen([BIN / "train_gpt", *map(str, args)], cwd=self.dir, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
            first.stdout.readline()
            while not (self.dir / "s").exists():
                time.sleep(0.01)
            for line in first.stdout:
                if "2/100000" in line:
                    break
            self.fail_with(78, ["s"], *self.minimal("s"))
            first.kill()
            first.communicate()
        self.succeed(*self.minimal("s"))   # the dead owner's lock is taken over


if __name__ == "__main__":
    main()
