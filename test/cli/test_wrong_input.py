"""What a user gets wrong ends with one line and the documented exit code, and overwrites nothing."""
import json
import os
import pathlib
import re
import subprocess
import tempfile

from harness import BIN, Cli, TEXT, main


class WrongInput(Cli):
    def setUp(self):
        super().setUp()
        (self.dir / "text.txt").write_text(TEXT)

    def train(self, **changes):
        args = {"model": "gpt2:d2x32", "data": "text.txt", "seq-length": 16, "micro-batch-size": 1,
                "steps": 2, "device": "cpu"}
        args.update({k.replace("_", "-"): v for k, v in changes.items()})
        return [x for k, v in args.items() if v is not None for x in ("--" + k, v)]

    def test_flags(self):
        self.succeed(*self.train())
        self.fail_with(64, ["--lr-shedule", "did you mean --lr-schedule"], *self.train(),
                       "--lr-shedule", "linear")
        self.fail_with(64, ["--step", "--steps"], *self.train(), "--step", 1)
        for value in ["abc", "12x", "", "-1", "nan", "inf", "1e999"]:
            self.fail_with(64, ["--lr"], *self.train(lr=value))
        for value in ["abc", "12x", "", "-1", "0", "1.5", "99999999999999999999"]:
            self.fail_with(64, ["--steps"], *self.train(steps=value))
        self.fail_with(64, ["--data"], *self.train(data=None))
        self.fail_with(64, ["--lr-schedule", "cosine"], *self.train(lr_schedule="cosin"))
        self.fail_with(64, ["--model", "gpt2:124M"], *self.train(model="gpt2:124m2"))
        self.fail_with(64, ["--warmup-steps"], *self.train(warmup_steps=5))
        self.fail_with(64, ["--global-batch-tokens", "16"], *self.train(global_batch_tokens=17))
        self.fail_with(64, ["--dtype", "fp32"], *self.train(dtype="bf16"))
        self.fail_with(64, ["--attention", "--device cpu"], *self.train(attention="cudnn"))
        self.fail_with(64, ["--exchange", "--device cpu"], *self.train(exchange="copy"))
        self.fail_with(64, ["--exchange", "auto, nccl, copy"], *self.train(exchange="ring"))
        self.fail_with(64, ["--master-weights", "bf16"], *self.train(master_weights="off"))
        self.fail_with(64, ["--moments", "fp64"], *self.train(moments="bf16", dtype="fp64"))
        self.fail_with(64, ["--loss-scale", "power of two"], *self.train(loss_scale=1000))
        self.fail_with(64, ["--save-every", "--save-dir"], *self.train(save_every=1))
        self.fail_with(64, ["--lr"], *self.train(), "--lr")
        self.fail_with(64, ["--steps"], *self.train(), "--steps", 3)

    def test_profile_steps(self):
        for value in ["0:1", "2:1", "1:3", "2", "a:b", "1:2:3"]:
            self.fail_with(64, ["--profile-steps", "A:B", "--steps"],
                           *self.train(device=None, profile_steps=value))
        self.fail_with(64, ["--profile-steps", "--device cuda"], *self.train(profile_steps="1:2"))

    def test_memory(self):
        """One line on what is needed, free and possible, then the plan's table."""
        result = self.run_program(*self.train(micro_batch_size=2**31 - 1))
        self.assertEqual(result.returncode, 71, result.stdout + result.stderr)
        first, *table = result.stderr.strip().splitlines()
        words = r"error: memory: the plan needs \S+ TiB, CPU .* has \S+ \wiB free of \S+ \wiB; "
        self.assertRegex(first, words + r"the largest --micro-batch-size that fits is [1-9]\d*$")
        for owner in ["activations", "weights", "device total"]:
            self.assertEqual(len([x for x in table if x.strip().startswith(owner)]), 1, table)
    def test_recompute_that_fits(self):
        """--recompute auto keeps everything of a small model, and of a large one what fits."""
        result = self.succeed(*self.train(recompute="auto"))
        self.assertIn("\nrecompute: nothing, as little as fits\n", result.stdout)

        def plan(batch, recompute):
            out = self.succeed("--plan", "--device", "cpu", "--model", "gpt2:124M", "--seq-length",
                               1024, "--micro-batch-size", batch, "--recompute", recompute).stdout
            return out, int(re.search(r"device total .* (\d+) B", out)[1])

        memory = dict(x.split(":") for x in pathlib.Path("/proc/meminfo").read_text().splitlines())
        free = int(memory["MemAvailable"].split()[0]) * 1024
        one, two = plan(1, "none")[1], plan(2, "none")[1]
        batch = 1 + int((1.5 * free - one) / (two - one))  # half as much again as there is
        out, total = plan(batch, "auto")
        self.assertRegex(out, r"recompute: (attention_out|full) in \d+ of 12 layers(, attention_out "
                              r"in the others)?, as little as fits")
        self.assertLess(total, free)
        self.assertGreater(total, 0.7 * free)

    def test_training_that_went_wrong(self):
        """Weights far out of range give no finite gradient any more: 30 skipped updates end the
        run, and the last checkpoint of before is still there."""
        run = self.train(lr="1e30", lr_schedule="constant", steps=100, dtype="fp32", save_dir="run",
                         save_every=20, keep=9, log_dir="run")
        result = self.run_program(*run)
        self.assertEqual(result.returncode, 70, result.stdout + result.stderr)
        self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)
        self.assertIn("error: step 31: the gradients of the last 30 updates", result.stderr)
        records = [json.loads(x) for x in (self.dir / "run" / "log.jsonl").read_text().splitlines()]
        self.assertEqual([r["skipped"] for r in records], list(range(31)))
        self.assertEqual(sorted(p.name for p in (self.dir / "run").glob("step_*")), ["step_00000020"])
        # A resume counts on from the skips before it.
        result = self.run_program(*run)
        self.assertEqual(result.returncode, 70)
        self.assertIn("error: step 31:", result.stderr)

    def test_config_file(self):
        config = self.dir / "run.toml"
        config.write_text('[model]\nmodel = "gpt2:d2x32"\n[optimizer]\nlr = 1e-3\n')
        self.succeed(*self.train(model=None, config="run.toml"))
        config.write_text('lr = 1e-3\n\nlearning_rate = 3\n')
        self.fail_with(64, ["run.toml:3", "learning_rate"], *self.train(config="run.toml"))
        config.write_text('lr = "fast"\n')
        self.fail_with(64, ["run.toml:1", "lr"], *self.train(config="run.toml"))
        config.write_text('lr = = 3\n')
        self.fail_with(64, ["run.toml:1"], *self.train(config="run.toml"))
        self.fail_with(66, ["none.toml"], *self.train(config="none.toml"))

    def test_data(self):
        self.fail_with(66, ["none_*.bin"], *self.train(data="none_*.bin"))
        (self.dir / "empty.txt").write_text("")
        self.fail_with(65, ["empty.txt"], *self.train(data="empty.txt"))
        tokens = [i % 200 for i in range(100)]
        for name, words, options in [
                ("magic.bin", ["magic"], {"magic": 20240521}),
                ("version.bin", ["version"], {"version": 9}),
                ("long.bin", [], {"count": 101}),
                ("negative.bin", [], {"count": -1})]:
            self.shard(name, tokens, **options)
            self.fail_with(65, [name] + words, *self.train(data=name, tokenizer="bytes"))
        whole = self.shard("good.bin", tokens).read_bytes()
        self.succeed(*self.train(data="good.bin", tokenizer="bytes"))
        for cut in [0, 3, 4, 1023, 1024, len(whole) - 1]:
            (self.dir / "cut.bin").write_bytes(whole[:cut])
            self.fail_with(65, ["cut.bin"], *self.train(data="cut.bin", tokenizer="bytes"))
        self.shard("short.bin", tokens[:16])
        self.fail_with(65, ["short.bin", "16", "17"],
                       *self.train(data="short.bin", tokenizer="bytes"))
        self.shard("large.bin", tokens[:50] + [300] + tokens[50:])
        self.fail_with(65, ["large.bin", "300", "50"],
                       *self.train(data="large.bin", tokenizer="bytes", steps=20))

    def test_model_files(self):
        self.fail_with(66, ["nowhere"], *self.train(model="nowhere/model"))
        folder = self.dir / "model"
        folder.mkdir()
        self.fail_with(66, ["model"], *self.train(model="model"))
        (folder / "config.json").write_text('{"model_type": "gpt2", "n_embd": 30, "n_head": 4, '
                                            '"n_layer": 1, "n_positions": 32, "vocab_size": 300}')
        (folder / "model.safetensors").write_bytes(b"")
        result = self.run_program(*self.train(model="model"))
        self.assertIn(result.returncode, (64, 65))
        self.assertEqual(len(result.stderr.strip().splitlines()), 1)

    def test_places_that_cannot_be_written(self):
        (self.dir / "file").write_text("mine")
        self.fail_with(77, ["file"], *self.train(save_dir="file"))
        self.fail_with(77, ["file/runs"], *self.train(save_dir="file/runs"))
        self.assertEqual((self.dir / "file").read_text(), "mine")

    def test_checkpoint_cut_or_changed(self):
        run = self.train(save_dir="run", steps=1, keep=1)
        self.succeed(*run)
        folder = self.dir / "run" / "step_00000001"
        for name in ["manifest.json", "model.safetensors", "optimizer.safetensors", "config.json"]:
            path = folder / name
            whole = path.read_bytes()
            n = len(whole)
            damaged = [whole[:k] for k in {0, 1, n // 3, n - 1}]
            damaged += [whole[:k] + bytes([whole[k] ^ 1]) + whole[k + 1:] for k in
                        {0, 9, n // 2, n - 2}]
            for data in damaged:
                path.write_bytes(data)
                result = self.run_program(*self.train(save_dir="run", steps=1, resume="must"))
                self.assertEqual(result.returncode, 65, result.stdout + result.stderr)
                self.assertIn(name, result.stderr)
                self.assertEqual(path.read_bytes(), data)
            path.write_bytes(whole)
        self.succeed(*self.train(save_dir="run", steps=1, resume="must"))


class Gpu(Cli):
    """--device cuda where there is no GPU, and its plan, which needs none."""

    def setUp(self):
        super().setUp()
        (self.dir / "text.txt").write_text(TEXT)
        self.cuda = "libcudart" in subprocess.run(["ldd", BIN / "train_gpt"], capture_output=True,
                                                  text=True).stdout

    def test_plan(self):
        args = ["--plan", "--device", "cuda", "--model", "gpt2:124M", "--micro-batch-size", 8]
        if not self.cuda:
            self.fail_with(71, ["built without CUDA", "cmake --preset cuda"], *args)
            return
        # Nothing of a driver may be asked for: with this one every call would fail.
        plans = [self.succeed(*args, env=self.with_driver(code)).stdout for code in ["", BROKEN]]
        self.assertEqual(plans[0], plans[1])
        self.assertIn("bf16 on a GPU", plans[0])
        bytes_of = {line.split()[0]: int(line.split()[-2]) for line in plans[0].splitlines()
                    if line.startswith("  ") and line.endswith(" B")}
        self.assertEqual(bytes_of["gradients"], 2 * bytes_of["weights"])
        self.assertGreater(bytes_of["workspace"], 0)
        self.fail_with(64, ["--dtype", "fp64"], *args, "--dtype", "fp64")

    def test_no_gpu(self):
        args = ["--device", "cuda", "--data", "text.txt", "--model", "gpt2:d2x32", "--steps", 1]
        if not self.cuda:
            self.fail_with(71, ["--device cuda", "built without CUDA", "--device cpu"], *args)
            return
        for code, words in [("", ["no NVIDIA driver", "CUDA 13"]),
                            (OLD, ["CUDA 12.4", "CUDA 13", "update the driver"]),
                            (BROKEN, ["NVIDIA driver"])]:
            self.fail_with(71, ["--device cuda", "--device cpu"] + words, *args,
                           env=self.with_driver(code))
        self.fail_with(71, ["--profile-steps", "no NVIDIA driver"], "--profile-steps", "1:1", *args[2:],
                       env=self.with_driver(""))
        self.succeed(*args[2:], env=self.with_driver(OLD))  # auto goes on without

    def with_driver(self, code):
        """An environment in which the NVIDIA driver's library is this C code; "" = not there."""
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.dir))
        source, library = folder / "driver.c", folder / "libcuda.so.1"
        source.write_text(code)
        if code:
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        else:
            library.write_text("")  # found first, and no library
        paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
        return dict(os.environ, LD_LIBRARY_PATH=":".join(filter(None, paths)))


# Drivers that the CUDA runtime can ask for their version, and no more.
OLD = "int cuDriverGetVersion(int *v) { *v = 12040; return 0; }\n"
BROKEN = "int cuDriverGetVersion(int *v) { *v = 13000; return 0; }\n"


class FirstMinutes(Cli):
    """What a newcomer does first works."""

    def test_help_plan_train_sample(self):
        result = self.succeed("--help")
        for word in ["--data", "--model", "--steps", "--save-dir"]:
            self.assertIn(word, result.stdout)
        self.assertLessEqual(max(map(len, result.stdout.splitlines())), 100)
        (self.dir / "text.txt").write_text(TEXT)
        plan = self.succeed("--plan", "--model", "gpt2:124M", "--device", "cpu").stdout
        for owner in ["weights", "gradients", "optimizer", "activations", "device total"]:
            self.assertIn(owner, plan)
        args = ["--model", "gpt2:d2x32", "--data", "text.txt", "--val-data", "text.txt",
                "--seq-length", 32, "--steps", 30, "--lr", 1e-2, "--eval-every", 30,
                "--sample-every", 30, "--save-dir", "run", "--device", "cpu"]
        self.succeed(*args)
        result = self.succeed("--model", "run", "--generate", "It is a truth", "--sample-tokens", 20,
                              "--device", "cpu")
        self.assertTrue(result.stdout.startswith("It is a truth"))
        self.assertTrue(pathlib.Path(self.dir / "run" / "step_00000030" / "config.json").exists())

    def test_verify_the_golden_references(self):
        from harness import SOURCE
        folders = sorted((SOURCE / "test" / "golden").glob("*/reference.json"))
        self.assertGreaterEqual(len(folders), 2)
        for path in folders:
            for dtype in ["fp64", "fp32"]:
                for recompute in ["none", "full"]:
                    with self.subTest(folder=path.parent.name, dtype=dtype):
                        result = self.succeed("--verify", path.parent, "--dtype", dtype, "--device",
                                              "cpu", "--recompute", recompute)
                        self.assertIn("passed", result.stdout)


if __name__ == "__main__":
    main()
