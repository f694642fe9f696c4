//! Regular files and nothing else: a FIFO, a socket or a device under a file's name would wait for ever, or never end.

use std::fs::{self, File, FileType, Metadata};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use contract::Digest;
use xxhash_rust::xxh3::Xxh3;

/// Opens a regular file for reading, through links too.
pub fn open(path: &Path) -> Result<File> {
    // Before it is opened, because opening a device may do something already.
    check(&fs::metadata(path)?)?;
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    // After, because it may have become another file in between.
    check(&file.metadata()?)?;
    Ok(file)
}

/// The bytes of a regular file.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut file = open(path)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX))?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The size of a regular file.
pub fn size(path: &Path) -> Result<u64> {
    let found = fs::metadata(path)?;
    check(&found)?;
    Ok(found.len())
}

/// The size and the xxh3-128 of what is read from here on; calls `passed` with bytes as they go.
pub fn digest(mut file: impl Read, passed: &dyn Fn(u64)) -> Result<(u64, Digest)> {
    let (mut hash, mut bytes, mut buffer) = (Xxh3::new(), 0, vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok((bytes, Digest(hash.digest128()))),
            Ok(count) => {
                hash.update(&buffer[..count]);
                bytes += count as u64;
                passed(count as u64);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// What a file is that is neither a regular file nor a folder, in words.
pub fn kind(found: FileType) -> &'static str {
    if found.is_fifo() {
        "a FIFO"
    } else if found.is_socket() {
        "a socket"
    } else if found.is_char_device() || found.is_block_device() {
        "a device"
    } else {
        "of an unknown kind"
    }
}

fn check(found: &Metadata) -> Result<()> {
    if found.is_file() {
        return Ok(());
    }
    if found.is_dir() {
        return Err(Error::from_raw_os_error(libc::EISDIR));
    }
    let what = format!("it is {}, not a regular file", kind(found.file_type()));
    Err(Error::new(ErrorKind::InvalidInput, what))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use contract::{Class, Fault};

    use super::*;

    #[test]
    fn only_regular_files_are_opened_and_nothing_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), b"seven").unwrap();
        symlink(path("file"), path("link")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read(&path(name)).unwrap(), b"seven");
            assert_eq!(size(&path(name)).unwrap(), 5);
        }
        assert!(Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
        let _socket = UnixListener::bind(path("socket")).unwrap();
        symlink(path("fifo"), path("linked")).unwrap();
        let special = ["fifo", "socket", "linked"].map(path).into_iter();
        for path in special.chain(["/dev/zero".into()]) {
            for error in [open(&path).map(drop), read(&path).map(drop), size(&path).map(drop)] {
                let fault = Fault::io("open", &path, &error.unwrap_err());
                assert_eq!(fault.class(), Class::Usage, "{fault}");
                assert!(fault.to_string().contains("not a regular file"), "{fault}");
            }
        }
        assert_eq!(open(folder.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        symlink(path("nothing"), path("dangling")).unwrap();
        assert_eq!(open(&path("dangling")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
