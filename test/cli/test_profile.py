"""scripts/profile.sh hands NVIDIA's profilers the right flags, and kernel_times.py adds up right."""
import os
import pathlib
import subprocess

from harness import BIN, Cli, SOURCE, main

# Stands in for nsys and ncu: writes down how it was called, and the files that it should make.
TOOL = """#!/usr/bin/env python3
import pathlib, sys
name = pathlib.Path(sys.argv[0]).name
with open("calls", "a") as f:
    print(name, *sys.argv[1:], file=f)
if "--log-file" in sys.argv:
    pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1]).write_text(pathlib.Path("csv").read_text())
if "all" in sys.argv:
    print(pathlib.Path("details").read_text())
if "source" in sys.argv:
    print(pathlib.Path("source").read_text())
"""


def row(kernel, ns, *ranges):
    stack = "574" + "".join(f'  ""torus:{r}:none:none:none:none:ASCII:{r}""' for r in ranges) + " "
    return f'"1","{stack}","{kernel}","{ns}"\n'


def source(name, *lines):
    """A kernel's instructions: executed, text, samples of selected, wait and long_sb."""
    columns = ["Address", "Source", "# Samples", "Instructions Executed", "stall_long_sb",
               "stall_selected", "stall_wait", "stall_wait (Not Issued)"]
    rows = [[i, text, selected + wait + long_sb, f"{executed:,}", long_sb, selected, wait, wait]
            for i, (executed, text, selected, wait, long_sb) in enumerate(lines)]
    return f'"Kernel Name","{name}"\n' + "".join(
        ",".join(f'"{cell}"' for cell in row) + "\n" for row in [columns] + rows)


KERNEL = source("f<3>", (8, "S2R R1, SR_TID.X ", 1, 0, 1), (4000, "FADD R1, R2,  R3", 10, 5, 0),
                (4000, "@!P0  MUFU.EX2 R1, R2", 10, 70, 0), (2000, "@P1 FADD R4, R2, R3", 10, 5, 0),
                (1000, "FMUL R1, R1, R1", 3, 0, 0), (90000, "YIELD", 0, 0, 90))

CSV = ('==PROF== Connected\n'
       '"ID","thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",'
       '"Kernel Name","gpu__time_duration.sum"\n"","","","ns"\n')


class Profile(Cli):
    def setUp(self):
        super().setUp()
        self.tools = self.dir / "tools"
        self.tools.mkdir()
        (self.dir / "csv").write_text(CSV + row("void torus::cuda::f<(int)3>(float *)", "1,500,000",
                                                "step 2", "forward", "layer 0", "gelu_forward"))
        (self.dir / "details").write_text("")
        (self.dir / "source").write_text(KERNEL)

    def install(self, *names):
        for name in names:
            (self.tools / name).write_text(TOOL)
            (self.tools / name).chmod(0o755)

    def profile(self, *args):
        path = f"{self.tools}:/usr/bin:/bin"
        return subprocess.run([SOURCE / "scripts" / "profile.sh", *map(str, args)], cwd=self.dir,
                              capture_output=True, text=True, env=dict(os.environ, PATH=path))

    def calls(self, *args):
        result = self.profile(*args, "--program", BIN / "train_gpt", "--out", self.dir / "out", "--",
                              "--model", "gpt2:d2")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return (self.dir / "calls").read_text().splitlines(), result.stdout

    def refused(self, code, words, *args):
        result = self.profile(*args)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1)

    def test_timeline(self):
        self.install("nsys")
        (record, stats), _ = self.calls("timeline", "--steps", "2:4")
        for flag in ["nsys profile", "--capture-range=cudaProfilerApi", "--trace=cuda,nvtx",
                     "--profile-steps 2:4", "--steps 4", "--model gpt2:d2", "--device cuda"]:
            self.assertIn(flag, record)
        self.assertTrue(stats.startswith("nsys stats"))
        self.assertTrue(stats.endswith("out.nsys-rep"))

    def test_times(self):
        self.install("ncu")
        (record,), table = self.calls("times", "--range", "backward")
        for flag in ["--profile-from-start off", "--nvtx ", "--nvtx-include torus@backward/",
                     "gpu__time_duration.sum", "--clock-control none", "--profile-steps 3:3"]:
            self.assertIn(flag, record)
        self.assertRegex(table, r"1 +1\.500 +100\.0% +forward +gelu_forward +f<3>\n")

    def test_kernels(self):
        self.install("ncu")
        (record, *show), _ = self.calls("kernels", "--kernel", "^norm", "--count", 2)
        for flag in ["--set full", "--kernel-name regex:^norm", "--launch-count 2"]:
            self.assertIn(flag, record)
        self.assertTrue(all("--import" in line for line in show))
        self.assertEqual((self.dir / "out.source.csv").read_text().strip(), KERNEL.strip())
        self.assertIn("MUFU", (self.dir / "out.txt").read_text())
        (self.dir / "calls").unlink()
        (record, *_), text = self.calls("kernels", "--sections", "SpeedOfLight,Occupancy")
        self.assertIn("--section SpeedOfLight --section Occupancy", record)
        self.assertNotIn("--set", record)
        self.assertNotIn("MUFU", text)
        self.assertIn("MUFU", self.calls("kernels", "--sections", "SourceCounters")[1])

    def stalls(self, text, *args):
        (self.dir / "s.csv").write_text(text)
        return subprocess.run([SOURCE / "scripts" / "kernel_stalls.py", self.dir / "s.csv", *args],
                              capture_output=True, text=True)

    def test_stalls(self):
        # Twice the same is one; what only spins, and what is executed rarely, is not of the loop.
        result = self.stalls("==PROF== Connected\n" + KERNEL + KERNEL + source(
            "g", (5, "EXIT", 1, 0, 0)), "--top", "2")
        self.assertEqual(result.returncode, 0, result.stderr)
        first, second = result.stdout.split("\n\n\n")
        lines = first.splitlines()
        self.assertEqual(lines[:2], ["f<3>", "205 samples; warps waited for: long_sb 44.4%, "
                                     "wait 39.0%, selected 16.6%"])
        self.assertIn("The loop: 3 instructions, 11 cycles of a warp", lines)
        self.assertEqual([line.split() for line in lines[5:7]],
                         [["1", "8.0", "MUFU"], ["2", "3.0", "FADD"]])
        self.assertEqual(lines[-2:], [" 43.9%      6        90000  YIELD: long_sb 90",
                                      " 39.0%      3         4000  @!P0 MUFU.EX2 R1, R2: wait 70, "
                                      "selected 10"])
        self.assertTrue(second.startswith("g\n1 samples"))
        self.assertIn("The loop: 4 ", self.stalls(KERNEL, "--loop", "0.2").stdout)

    def test_stalls_refused(self):
        for text, words in [("", "no kernel"), (CSV, "no kernel"),
                            (KERNEL.replace("# Samples", "Samples"), "SourceCounters"),
                            (source("f", (5, "EXIT", 0, 0, 0)), "no samples")]:
            result = self.stalls(text)
            self.assertEqual(result.returncode, 1)
            self.assertRegex(result.stderr, "^error: .*" + words)
            self.assertEqual(len(result.stderr.splitlines()), 1)

    def test_refused(self):
        self.refused(64, ["mode"], "everything")
        self.refused(64, ["unknown option"], "times", "--model", "gpt2:d2")
        self.refused(64, ["--steps", "A:B"], "times", "--steps", "3")
        self.refused(64, ["--count"], "kernels", "--count", "0")
        self.refused(64, ["--kernel", "value"], "kernels", "--kernel")
        self.refused(64, ["timeline"], "timeline", "--range", "forward")
        if not any(pathlib.Path(p, "ncu").exists() for p in ["/usr/bin", "/usr/local/cuda/bin"]):
            self.refused(66, ["ncu", "Nsight Compute"], "times")
        self.install("ncu")
        self.refused(66, ["nowhere", "cmake"], "times", "--program", "nowhere")
        self.assertIn("MODE", self.profile("--help").stdout)

    def test_sums(self):
        deep = ("step 2", "backward", "layer 11")
        (self.dir / "t.csv").write_text(
            CSV + row("void torus::cuda::f<float>(int)", 2000, *deep, "gelu_backward")
            + row("void torus::cuda::f<float>(int)", "1,000,000", *deep, "gelu_backward")
            + row("g", 3000000, "step 2", "optimizer", "adamw") + row("g", 1000000))

        def table(by):
            out = subprocess.run([SOURCE / "scripts" / "kernel_times.py", self.dir / "t.csv", "--by", by],
                                 capture_output=True, text=True, check=True).stdout
            return [line.split() for line in out.splitlines()]

        self.assertEqual(table("kernel")[1:-1],
                         [["1", "3.000", "60.0%", "optimizer", "adamw", "g"],
                          ["2", "1.002", "20.0%", "backward", "gelu_backward", "f<float>"],
                          ["1", "1.000", "20.0%", "none", "none", "g"]])
        self.assertEqual(table("op")[2], ["2", "1.002", "20.0%", "gelu_backward"])
        self.assertEqual(table("part")[1], ["1", "3.000", "60.0%", "optimizer"])
        self.assertEqual(table("part")[-1][:2], ["4", "5.002"])


if __name__ == "__main__":
    main()
