"""A GPU's runs: references, the same bits from run to run, across a resume and however much is
recomputed, and what happens when memory does not suffice. Skipped where there is no GPU."""
import json
import unittest

from harness import SOURCE, Cli, main

STEPS = 20


class Cuda(Cli):
    @classmethod
    def setUpClass(cls):
        probe = cls("run_program")
        probe.setUp()
        probe.shard("train.bin", range(99))
        result = probe.run_program("--model", "gpt2:d1x32", "--data", "train.bin", "--seq-length", 8,
                                   "--micro-batch-size", 1, "--steps", 1, "--device", "cuda")
        probe.doCleanups()
        if "--device cuda" in result.stderr:
            raise unittest.SkipTest(result.stderr.strip())

    def setUp(self):
        super().setUp()
        self.shard("train.bin", [(7 * j + j * j // 3) % 257 for j in range(4001)])

    def train(self, model, folder, steps, *extra):
        return self.succeed("--model", model, "--tokenizer", "bytes", "--data", "train.bin",
                            "--seq-length", 96, "--micro-batch-size", 3, "--global-batch-tokens",
                            576, "--steps", steps, "--lr-schedule", "constant", "--device", "cuda",
                            "--save-dir", folder, "--log-dir", folder, *extra)

    def results(self, folder):
        """Weights and moments as bytes, and every step's loss and norm."""
        last = self.dir / folder / f"step_{STEPS:08d}"
        records = map(json.loads, (self.dir / folder / "log.jsonl").read_text().splitlines())
        return ([(last / f).read_bytes() for f in ("model.safetensors", "optimizer.safetensors")],
                [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r])

    def test_references(self):
        for reference in sorted((SOURCE / "test" / "golden").glob("*/")):
            for dtype in ["fp32", "bf16", "fp16"]:
                with self.subTest(reference=reference.name, dtype=dtype):
                    self.succeed("--verify", reference, "--device", "cuda", "--dtype", dtype)

    def test_same_bits(self):
        for model in ["gpt2:d3x256", "llama:d3x256"]:
            for dtype in ["bf16", "fp16", "fp32"]:
                name = f"{model[:4]}_{dtype}"
                self.train(model, name, STEPS, "--dtype", dtype)
                want = self.results(name)
                self.assertEqual([s for s, *_ in want[1]], list(range(1, STEPS + 1)))
                with self.subTest(name, what="once more"):
                    self.train(model, name + "_again", STEPS, "--dtype", dtype)
                    self.assertEqual(self.results(name + "_again"), want)
                with self.subTest(name, what="resumed"):
                    for steps in [1, 8, STEPS]:
                        self.train(model, name + "_parts", steps, "--dtype", dtype)
                    self.assertEqual(self.results(name + "_parts"), want)
                for recompute in ["attention_out", "full"]:
                    with self.subTest(name, recompute=recompute):
                        self.train(model, name + recompute, STEPS, "--dtype", dtype,
                                   "--recompute", recompute)
                        self.assertEqual(self.results(name + recompute), want)

    def test_any_order(self):
        self.train("llama:d3x256", "fixed", STEPS)
        self.train("llama:d3x256", "any", STEPS, "--deterministic", "off")
        for a, b in zip(self.results("fixed")[1], self.results("any")[1]):
            self.assertLess(abs(a[1] - b[1]), 0.02 * a[1])

    def test_cuda_graph(self):
        """Recorded launches give the bits of launches one by one."""
        for model in ["gpt2:d3x256", "llama:d3x256"]:
            for extra in [[], ["--document-mask", "on"], ["--recompute", "full"],
                          ["--dtype", "fp16"]]:
                name = model[:4] + "".join(extra)
                with self.subTest(name):
                    self.train(model, name, STEPS, *extra, "--cuda-graph", "off")
                    self.train(model, name + "_graph", STEPS, *extra, "--cuda-graph", "on")
                    self.assertEqual(self.results(name), self.results(name + "_graph"))

    def test_tuned_matmul(self):
        tune = ["--tune-matmul", "choices.txt"]
        self.train("gpt2:d2x128", "one", STEPS, *tune)
        choices = (self.dir / "choices.txt").read_text()
        self.assertGreater(len(choices.splitlines()), 8)
        self.train("gpt2:d2x128", "two", STEPS, *tune)
        self.assertEqual(self.results("one"), self.results("two"))
        self.assertEqual((self.dir / "choices.txt").read_text(), choices)

    def test_out_of_memory(self):
        result = self.run_program("--model", "gpt2:1558M", "--data", "train.bin", "--seq-length",
                                  1024, "--micro-batch-size", 4000, "--steps", 1, "--device", "cuda")
        self.assertEqual(result.returncode, 71, result.stderr)
        for word in ["error: memory: the plan needs", "the largest --micro-batch-size that fits is",
                     "activations", "device total"]:
            self.assertIn(word, result.stderr)


if __name__ == "__main__":
    main()
