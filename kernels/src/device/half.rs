//! The GPU half of libtorch: where to look for it, and which one was opened.
//!
//! Both halves are one library cut in two, so in folders that we search ourselves only a half of the same release is
//! opened. A user's own libtorch and the paths of the loader are trusted.

use std::ffi::{CString, c_char, c_int};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::shim::{compiled_against, guarded, number, said};
use crate::{Error, Result};

unsafe extern "C" {
    fn shim_libtorch_folder() -> c_int;
    fn shim_open_library(path: *const c_char) -> c_int;
    fn shim_gpu_registered(out: *mut c_int) -> c_int;
}

/// Libraries of the GPU half, by vendor.
const LIBRARIES: [&str; 2] = ["libtorch_cuda.so", "libtorch_hip.so"];

/// The one that was opened: its path, or its name where the loader chose the path.
static OPENED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// The library that [`open`] has opened, if any.
pub(super) fn opened() -> Option<PathBuf> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Whether it is AMD's, and so are the libraries that it uses.
pub(super) fn is_amds() -> bool {
    opened().is_some_and(|path| path.file_name() == Some(LIBRARIES[1].as_ref()))
}

/// Folders of the libraries that are installed with the opened half, in a Python environment or in our cache.
pub(super) fn beside() -> Vec<PathBuf> {
    let Some(lib) = opened().and_then(|path| Some(path.parent()?.to_owned())) else {
        return Vec::new();
    };
    let vendors = lib.parent().and_then(Path::parent).map(|root| root.join("nvidia"));
    let entries = vendors.and_then(|vendors| std::fs::read_dir(vendors).ok());
    let mut found: Vec<_> = entries
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join("lib")))
        .collect();
    found.sort();
    found.insert(0, lib);
    found.retain(|folder| folder.is_dir());
    found
}

/// Opens the GPU half unless it is open; the error says where it was searched for and how to get one.
pub(super) fn open() -> std::result::Result<(), String> {
    let words = |error: Error| error.to_string();
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: reads a registry into an out-pointer that outlives the call.
    let registered = number("ask for a GPU", |out| unsafe { shim_gpu_registered(out) });
    if registered.map_err(words)? != 0 {
        return Ok(());
    }
    let release = compiled_against().map_err(words)?;
    let in_use = folder_in_use().map_err(words)?;
    let variable =
        |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let SearchResult { folders, passed } =
        SearchPaths { in_use, release: &release, variable: &variable }.folders();
    let mut refusals = Vec::new();
    for library in LIBRARIES {
        // The loader's own choice for the bare name takes precedence over the other folders.
        let mut paths: Vec<_> = folders.iter().map(|folder| folder.join(library)).collect();
        paths.insert(1, PathBuf::from(library));
        for path in paths {
            let Ok(name) = CString::new(path.as_os_str().as_encoded_bytes()) else { continue };
            // SAFETY: the name is a C string. Opening a library runs its initializers; it either matches the libtorch
            // in use or is the loader's own choice, as if we had linked it.
            if unsafe { shim_open_library(name.as_ptr()) } == 0 {
                *opened = Some(path);
                return Ok(());
            }
            refusals.push((path, said()));
        }
    }
    // A library that exists but cannot be opened is more informative than a missing one.
    let here = refusals.iter().find(|(path, _)| is_there(path));
    Err(refusal(&release, &folders, &passed, here.map(|(_, reason)| reason.as_str())))
}

/// Whether a library exists, by path or by a bare name that the loader resolves.
fn is_there(library: &Path) -> bool {
    let places = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    library.is_absolute() && library.exists()
        || std::env::split_paths(&places).any(|folder| folder.join(library).exists())
}

fn refusal(release: &str, folders: &[PathBuf], passed: &[String], here: Option<&str>) -> String {
    let mut text = match here {
        Some(reason) => format!("the GPU half of libtorch could not be opened: {reason}"),
        None => format!("no GPU half of libtorch {release} is here"),
    };
    for (at, folder) in folders.iter().enumerate() {
        let _ = write!(text, "{} {}", if at == 0 { "; looked in" } else { "," }, folder.display());
    }
    if !passed.is_empty() {
        let _ = write!(text, "; passed over, as another release or build: {}", passed.join(", "));
    }
    text.push_str(
        "; `python3 kernels/libtorch/provision.py --cuda` fetches that for NVIDIA; for AMD, build with LIBTORCH naming the \
         libtorch of a ROCm PyTorch",
    );
    text
}

/// The folder of the library that computes on the CPU.
fn folder_in_use() -> Result<PathBuf> {
    // SAFETY: takes nothing.
    guarded("find libtorch", unsafe { shim_libtorch_folder() })?;
    Ok(PathBuf::from(said()))
}

/// What determines where a GPU half is searched for.
struct SearchPaths<'a> {
    in_use: PathBuf,
    release: &'a str,
    variable: &'a dyn Fn(&str) -> Option<PathBuf>,
}

/// Result of the search.
struct SearchResult {
    /// Likeliest first.
    folders: Vec<PathBuf>,
    /// Descriptions of installations that do not fit.
    passed: Vec<String>,
}

impl SearchPaths<'_> {
    /// Folders to search: next to the libtorch in use, in the libtorch or Python environment named by variables, and
    /// where `provision.py --cuda` installs it.
    fn folders(&self) -> SearchResult {
        let (mut folders, mut passed) = (vec![self.in_use.clone()], Vec::new());
        let mut fits = |torch: &PathBuf| {
            let (version, fits) = self.stated(torch);
            // Folders without torch are not mentioned.
            if !fits && !version.is_empty() {
                passed.push(format!("{version} in {}", torch.display()));
            }
            fits
        };
        let mut add = |folder: PathBuf| {
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        };
        if let Some(torch) = (self.variable)("LIBTORCH").filter(&mut fits) {
            add(torch.join("lib"));
        }
        for environment in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            let Some(root) = (self.variable)(environment) else { continue };
            packages(&root).into_iter().filter(&mut fits).for_each(|torch| add(torch.join("lib")));
        }
        let cache = (self.variable)("XDG_CACHE_HOME")
            .or_else(|| (self.variable)("HOME").map(|home| home.join(".cache")));
        if let Some(cache) = cache {
            add(cache.join(format!("ztrain/libtorch-{}-cuda/torch/lib", self.release)));
        }
        SearchResult { folders, passed }
    }

    /// The version that a torch folder states, and whether it fits: our release, but no Python package for ROCm.
    fn stated(&self, torch: &Path) -> (String, bool) {
        let read = |name| std::fs::read_to_string(torch.join(name)).unwrap_or_default();
        let python = read("version.py");
        let stated = python.lines().find_map(|line| line.strip_prefix("__version__ = '"));
        let stated = stated.and_then(|rest| rest.strip_suffix('\''));
        let own = read("build-version");
        let (stated, is_python) = stated.map_or((own.trim(), false), |stated| (stated, true));
        let (release, built) = stated.split_once('+').unwrap_or((stated, ""));
        let fits = release == self.release && !(is_python && built.starts_with("rocm"));
        (stated.to_owned(), fits)
    }
}

/// Folders of torch in a Python environment.
fn packages(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(root.join("lib")) else { return Vec::new() };
    let pythons = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let pythons = pythons.filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
    });
    let mut found: Vec<_> = pythons.map(|python| python.join("site-packages/torch")).collect();
    found.retain(|torch| torch.is_dir());
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::*;

    #[test]
    fn a_half_of_another_release_is_not_looked_at() {
        let scratch = tempfile::tempdir().unwrap();
        let torch = |name: &str, version: &str| {
            let torch = scratch.path().join(name).join("lib/python3.12/site-packages/torch");
            fs::create_dir_all(&torch).unwrap();
            fs::write(torch.join("version.py"), format!("import os\n__version__ = '{version}'\n"))
                .unwrap();
            torch
        };
        let right = torch("right", "2.11.0+cu130");
        for wrong in ["2.10.0+cu130", "2.11.1", "2.11.0+rocm7.2"] {
            torch(wrong, wrong);
        }
        let looked = |variables: &[(&str, &str)]| {
            let variables: BTreeMap<_, _> = variables.iter().copied().collect();
            let variable = |name: &str| variables.get(name).map(|name| scratch.path().join(name));
            let places =
                SearchPaths { in_use: "/in/use".into(), release: "2.11.0", variable: &variable };
            places.folders()
        };
        let passed = looked(&[("VIRTUAL_ENV", "2.10.0+cu130"), ("CONDA_PREFIX", "right")]).passed;
        assert!(passed.len() == 1 && passed[0].starts_with("2.10.0+cu130 in "), "{passed:?}");
        let looked = |variables: &[(&str, &str)]| looked(variables).folders;
        let [in_use, lib] = [PathBuf::from("/in/use"), right.join("lib")];
        let only = vec![in_use.clone()];
        assert_eq!(looked(&[]), only);
        assert_eq!(looked(&[("VIRTUAL_ENV", "right")]), [in_use.clone(), lib.clone()]);
        assert_eq!(
            looked(&[("CONDA_PREFIX", "right"), ("VIRTUAL_ENV", "2.11.1")]),
            [in_use.clone(), lib.clone()]
        );
        assert_eq!(
            looked(&[("VIRTUAL_ENV", "2.10.0+cu130"), ("CONDA_PREFIX", "2.11.0+rocm7.2")]),
            only
        );
        assert_eq!(looked(&[("VIRTUAL_ENV", "nowhere")]), only);
        let own = right.strip_prefix(scratch.path()).unwrap().to_str().unwrap().to_owned();
        assert_eq!(looked(&[("LIBTORCH", &own), ("VIRTUAL_ENV", "right")]), [in_use.clone(), lib]);
        let home = scratch.path().join("me/.cache/ztrain/libtorch-2.11.0-cuda/torch/lib");
        assert_eq!(looked(&[("HOME", "me")]), [in_use, home]);
    }

    #[test]
    fn a_refusal_says_where_it_looked_and_what_to_do() {
        let text = refusal("2.11.0", &["/a".into(), "/b".into()], &[], None);
        assert!(text.contains("2.11.0 is here; looked in /a, /b; `python3"), "{text}");
        let text = refusal("2.11.0", &["/a".into()], &["2.9 in /b".into()], None);
        assert!(
            text.contains("looked in /a; passed over, as another release or build: 2.9 in /b; `")
        );
        let text = refusal("2.11.0", &["/a".into()], &[], Some("libcudnn.so.9: missing"));
        assert!(
            text.contains("could not be opened: libcudnn.so.9: missing; looked in /a;"),
            "{text}"
        );
    }
}
