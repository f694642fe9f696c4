//! Copies of objects on this machine, as many bytes of them as are allowed.
//!
//! A copy is a file named by the digest of what it is a copy of, version included; it appears by rename, whole. Whoever
//! uses one holds a shared lock on it; the oldest ones that nobody holds go first when there are too many bytes.

use std::fs::{self, File};
use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use contract::Digest;
use store::far::Near;

/// Bytes that are kept, unless `ZDATA_CACHE_BYTES` says otherwise.
const CACHE_BYTES: u64 = 16 << 30;

/// What the names of copies begin with that are not whole yet.
const PART: &str = ".part-";

/// The copies of this machine.
pub(super) struct Cache {
    folder: PathBuf,
    limit: u64,
    /// Bytes there, about: counted anew whenever they seem too many.
    bytes: Mutex<u64>,
}

/// Where copies are kept.
pub(super) fn folder() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("ZDATA_CACHE") {
        return Ok(PathBuf::from(folder));
    }
    let root = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let root = root.or_else(home).ok_or_else(|| Error::other("no HOME: set ZDATA_CACHE"))?;
    Ok(root.join("ztrain").join("s3"))
}

impl Cache {
    pub(super) fn open() -> Result<Self> {
        let folder = folder()?.join("copies");
        fs::create_dir_all(&folder)?;
        let stated = std::env::var("ZDATA_CACHE_BYTES").ok().and_then(|text| text.parse().ok());
        let cache = Cache { folder, limit: stated.unwrap_or(CACHE_BYTES), bytes: Mutex::new(0) };
        cache.clear_parts()?;
        let there = cache.there()?.iter().map(|(_, bytes, _)| bytes).sum();
        *cache.bytes.lock().unwrap_or_else(PoisonError::into_inner) = there;
        Ok(cache)
    }

    /// Removes what killed processes left: whoever is at work on a part holds a lock on it.
    fn clear_parts(&self) -> Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let part =
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PART));
            if part && File::open(&path).is_ok_and(|file| file.try_lock().is_ok()) {
                // Another process may have done so meanwhile.
                let _ = fs::remove_file(&path);
            }
        }
        Ok(())
    }

    /// The copy of `key`, made by `fill` if there is none; its name ends in `name`.
    pub(super) fn get(
        &self,
        key: &str,
        name: &str,
        fill: impl Fn(&mut File) -> Result<()>,
    ) -> Result<Near> {
        let path = self.folder.join(format!("{}-{name}", Digest::of_bytes(key.as_bytes())));
        loop {
            match File::open(&path) {
                Ok(hold) => {
                    hold.lock_shared()?;
                    // Whoever clears away removes before it lets go.
                    if path.exists() {
                        return Ok(Near::copy(path, hold));
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    self.make(&path, &fill)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn make(&self, path: &Path, fill: &impl Fn(&mut File) -> Result<()>) -> Result<()> {
        let thread = format!("{:?}", std::thread::current().id());
        let number: String = thread.chars().filter(char::is_ascii_digit).collect();
        let part = self.folder.join(format!("{PART}{}-{number}", std::process::id()));
        let made = (|| {
            let mut file = File::create(&part)?;
            file.lock()?;
            fill(&mut file)?;
            let bytes = file.metadata()?.len();
            self.make_room(bytes)?;
            fs::rename(&part, path)
        })();
        if made.is_err() {
            // The error at hand says more than one about this file.
            let _ = fs::remove_file(&part);
        }
        made
    }

    /// Counts `more` bytes, and clears the oldest copies away if that is too many.
    fn make_room(&self, more: u64) -> Result<()> {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        *bytes += more;
        if *bytes <= self.limit {
            return Ok(());
        }
        let mut there = self.there()?;
        there.sort();
        let mut sum = more + there.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
        for (_, size, path) in there {
            if sum <= self.limit {
                break;
            }
            let Ok(file) = File::open(&path) else { continue };
            if file.try_lock().is_ok() && fs::remove_file(&path).is_ok() {
                sum -= size;
            }
        }
        *bytes = sum;
        Ok(())
    }

    /// Every copy: when it was made, its size, its path.
    fn there(&self) -> Result<Vec<(SystemTime, u64, PathBuf)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            // Another process may clear it away meanwhile.
            let Ok(about) = entry.metadata() else { continue };
            if about.is_file() && !entry.file_name().to_string_lossy().starts_with('.') {
                found.push((about.modified()?, about.len(), entry.path()));
            }
        }
        Ok(found)
    }
}
