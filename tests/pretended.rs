//! A stand-in GPU for tests of whole programs: libraries (`kernels/device/standin`, `kernels/device/emulator`) compiled
//! here against the libtorch in use, under the names of either vendor's libraries.
//!
//! It computes on the CPU, keeps vector clocks for streams and events, and counts operations.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::ranks::Fixture;
use crate::support::Ran;

/// The source folder of kernels and stand-ins.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/device")
}

/// The vendor whose library names are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vendor {
    Nvidia,
    Amd,
}

impl Vendor {
    /// The folder with the stand-in for libtorch's GPU library; its name is a digest of its sources.
    fn half(self) -> &'static Path {
        static FOLDERS: [OnceLock<PathBuf>; 2] = [OnceLock::new(), OnceLock::new()];
        let (name, flag) = match self {
            Vendor::Nvidia => ("libtorch_cuda.so", None),
            Vendor::Amd => ("libtorch_hip.so", Some("-DSTANDIN_HIP")),
        };
        FOLDERS[self as usize].get_or_init(|| {
            let libtorch =
                PathBuf::from(std::env::var_os("LIBTORCH").expect("cargo sets LIBTORCH"));
            let libtorch = libtorch.canonicalize().unwrap();
            made(&["standin"], &libtorch, &[name], |compiler| {
                let include = libtorch.join("include");
                compiler.args(flag).arg("-isystem").arg(&include).arg("-isystem");
                compiler.arg(include.join("torch/csrc/api/include")).arg("standin/gpu.cpp");
                compiler.arg("-L").arg(libtorch.join("lib")).args(["-ltorch_cpu", "-lc10"]);
            })
        })
    }

    /// The folder with the emulator under the names of a compiler's and a driver's library, which run our own kernels.
    fn driver(self) -> &'static Path {
        static FOLDERS: [OnceLock<PathBuf>; 2] = [OnceLock::new(), OnceLock::new()];
        let names = match self {
            Vendor::Nvidia => ["libcuda.so.1", "libnvrtc.so.13"],
            Vendor::Amd => ["libamdhip64.so.7", "libhiprtc.so.7"],
        };
        FOLDERS[self as usize].get_or_init(|| {
            made(&["", "emulator"], Path::new(""), &names, |compiler| {
                compiler.args(["-ffp-contract=off", "-fno-strict-aliasing", "emulator/driver.cpp"]);
                compiler.arg("emulator/emulator.cpp");
            })
        })
    }

    /// Makes `--device cuda` of a command the stand-in, which counts operations in `report`. Our own kernels run on the
    /// emulator.
    pub(crate) fn pretend(self, command: &mut Command, report: &Path) {
        // Ranks share the devices that these name.
        command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("HIP_VISIBLE_DEVICES");
        let folders = [self.half(), self.driver()];
        command.env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap());
        command.env("STANDIN_REPORT", report).env("XDG_CACHE_HOME", self.driver());
        if self == Vendor::Nvidia {
            // As on a GPU whose architecture has a grouped matmul in libtorch: the stand-in has no architecture.
            command.env("ZTRAIN_GROUPED", "library");
        }
    }
}

/// The folder with the stand-in as `libtorch_cuda.so`.
pub(crate) fn libtorch_cuda() -> &'static Path {
    Vendor::Nvidia.half()
}

/// A stand-in GPU under NVIDIA's names.
pub(crate) fn pretend(command: &mut Command, report: &Path) {
    Vendor::Nvidia.pretend(command, report);
}

/// A folder with a library under these names, compiled if missing from the files in `folders` and at `from`.
fn made(
    folders: &[&str],
    from: &Path,
    names: &[&str],
    arguments: impl FnOnce(&mut Command),
) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    from.hash(&mut hasher);
    let entries =
        folders.iter().flat_map(|folder| std::fs::read_dir(sources().join(folder)).unwrap());
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.is_file());
    files.sort();
    files.iter().for_each(|file| std::fs::read(file).unwrap().hash(&mut hasher));
    let name = format!("{}-{:016x}", names[0], hasher.finish());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if names.iter().any(|name| !folder.join(name).exists()) {
        std::fs::create_dir_all(&folder).unwrap();
        let own = folder.join(std::process::id().to_string());
        let mut compiler = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
        compiler.current_dir(sources()).args(["-std=c++17", "-O2", "-Wall", "-shared", "-fPIC"]);
        compiler.arg("-pthread").arg("-o").arg(&own);
        arguments(&mut compiler);
        let made = compiler.output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        for name in &names[1..] {
            std::fs::copy(&own, folder.join(name)).unwrap();
        }
        std::fs::rename(own, folder.join(names[0])).unwrap();
    }
    folder
}

/// The counter `name`, summed over the processes that used a stand-in.
pub(crate) fn total(report: &Path, name: &str) -> u64 {
    let text = std::fs::read_to_string(report).unwrap();
    assert!(!text.is_empty(), "nobody used the stand-in");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| line[name].as_u64().unwrap()).sum()
}

/// The devices on which each process had a context when it ended, as a bit mask, ascending; without processes that had
/// none. A real context takes hundreds of megabytes.
pub(crate) fn contexts(report: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(report).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut found: Vec<u64> = lines.map(|line| line["contexts_on"].as_u64().unwrap()).collect();
    found.retain(|on| *on != 0);
    found.sort_unstable();
    found
}

/// Counts of operations by name, summed over processes.
pub(crate) fn by_name(report: &Path) -> BTreeMap<String, f64> {
    let text = std::fs::read_to_string(report).unwrap();
    let mut found = BTreeMap::new();
    for line in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        for (name, times) in line["by_name"].as_object().unwrap() {
            *found.entry(name.clone()).or_insert(0.0) += times.as_f64().unwrap();
        }
    }
    found
}

/// A small run on the stand-in: by libtorch's operators alone, which are ten times faster than the emulator, or by our
/// own kernels.
pub(crate) struct OnDevice {
    pub(crate) fixture: Fixture,
    own: bool,
    vendor: Vendor,
    /// Variables that choose kernels.
    environment: &'static [(&'static str, &'static str)],
}

impl OnDevice {
    pub(crate) fn by_libtorch() -> Self {
        OnDevice::by_libtorch_of(&[])
    }

    /// With this change of the curriculum.
    pub(crate) fn by_libtorch_of(change: &[(&str, &str)]) -> Self {
        OnDevice { own: false, ..OnDevice::by_ours(Fixture::new(change)) }
    }

    pub(crate) fn by_ours(fixture: Fixture) -> Self {
        OnDevice { fixture, own: true, vendor: Vendor::Nvidia, environment: &[] }
    }

    /// With kernels chosen by these variables.
    pub(crate) fn choosing(self, environment: &'static [(&'static str, &'static str)]) -> Self {
        OnDevice { environment, ..self }
    }

    pub(crate) fn by_ours_on_amd(fixture: Fixture) -> Self {
        OnDevice { vendor: Vendor::Amd, ..OnDevice::by_ours(fixture) }
    }

    /// The ledger of a run.
    pub(crate) fn ledger(&self, out: &str) -> String {
        std::fs::read_to_string(self.fixture.scratch.path(out).join("ledger.jsonl")).unwrap()
    }

    pub(crate) fn report(&self, out: &str) -> PathBuf {
        self.fixture.scratch.path(&format!("{out}.report"))
    }

    pub(crate) fn command(&self, out: &str, extra: &[&str]) -> Command {
        self.command_on("cuda", out, &[&["--validate-every", "0"][..], extra].concat())
    }

    /// A command on this device with all features of a run.
    pub(crate) fn command_on(&self, device: &str, out: &str, extra: &[&str]) -> Command {
        let args = [&["--device", device, "--quiet"][..], extra].concat();
        let mut command = self.fixture.run(out, &args);
        self.vendor.pretend(&mut command, &self.report(out));
        if !self.own {
            command.env("LD_LIBRARY_PATH", self.vendor.half());
        }
        command.envs(self.environment.iter().copied());
        command
    }

    /// A replay with the same variables.
    pub(crate) fn replay(&self, extra: &[&str]) -> Command {
        let mut command =
            crate::support::ztrain_command(&[&["replay", "--device", "cuda"], extra].concat());
        self.vendor.pretend(&mut command, &self.report("replayed"));
        command.envs(self.environment.iter().copied());
        command
    }

    /// Runs to the end, or as far as `extra` says, and asserts that there are no races.
    #[track_caller]
    pub(crate) fn finish(&self, out: &str, extra: &[&str]) {
        let ran = Ran::from(self.command(out, extra).output().unwrap());
        assert!(!ran.err.contains("stand-in:"), "{}", ran.err);
        assert!(!ran.err.contains("Warning"), "libtorch warns: {}", ran.err);
        // Without a GPU compiler libtorch computes everything, and the output says so.
        assert_eq!(!self.own, ran.err.contains("no kernels of our own on Cuda("), "{}", ran.err);
        ran.ok();
        assert_eq!(total(&self.report(out), "races"), 0);
    }

    /// Whether a fault causes a race in a run of two steps. Tried several times: a host thread may happen to wait for
    /// the same event, which hides a missing wait.
    pub(crate) fn shows(&self, fault: &str, extra: &[&str]) -> bool {
        (0..8).any(|turn| self.races(&format!("lost-{turn}"), fault, extra) > 0)
    }

    /// The number of races of a run of two steps with a fault.
    pub(crate) fn races(&self, name: &str, fault: &str, extra: &[&str]) -> u64 {
        let out = format!("{name}-{}", fault.replace(':', "-"));
        let mut command = self.command(&out, &[&["--stop-after", "2"], extra].concat());
        Ran::from(command.env("STANDIN_FAULT", fault).output().unwrap()).ok();
        total(&self.report(&out), "races")
    }
}
