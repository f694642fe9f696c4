//! Opens regular files only: a FIFO, a socket or a device in place of a file could block forever, or never end.

use std::fs::{self, File, FileType, Metadata};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use contract::{Digest, Identity};
use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::Xxh3;

/// Opens a regular file for reading, through links too.
pub fn open(path: &Path) -> Result<File> {
    // Before it is opened, because opening a device may have effects.
    check(&fs::metadata(path)?)?;
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    // After, because the file may have been replaced in between.
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

/// The text of a regular file.
pub fn read_to_string(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?).map_err(|error| Error::new(ErrorKind::InvalidData, error))
}

/// The size of a regular file.
pub fn size(path: &Path) -> Result<u64> {
    let found = fs::metadata(path)?;
    check(&found)?;
    Ok(found.len())
}

/// The size and the xxh3-128 of the rest of a reader; calls `passed` with the bytes of each piece.
pub fn digest(file: impl Read, passed: &dyn Fn(u64)) -> Result<(u64, Digest)> {
    let mut hash = Xxh3::new();
    let bytes = each_piece(file, |piece| {
        hash.update(piece);
        passed(piece.len() as u64);
    })?;
    Ok((bytes, Digest(hash.digest128())))
}

/// The size and the SHA-256 of the rest of a reader.
pub fn identity(file: impl Read) -> Result<(u64, Identity)> {
    let mut hash = Sha256::new();
    let bytes = each_piece(file, |piece| hash.update(piece))?;
    Ok((bytes, Identity(hash.finalize().into())))
}

/// Passes the rest of a reader to `take`, piece by piece; returns the number of bytes.
pub fn each_piece(mut file: impl Read, mut take: impl FnMut(&[u8])) -> Result<u64> {
    let (mut bytes, mut buffer) = (0, vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Ok(count) => {
                take(&buffer[..count]);
                bytes += count as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The name of a file type that is neither a regular file nor a folder.
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

    /// Seven bytes, returned one at a time, each after an interruption.
    struct Interrupted(u8);

    impl Read for Interrupted {
        fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
            self.0 += 1;
            if self.0 % 2 == 1 {
                return Err(ErrorKind::Interrupted.into());
            }
            buffer[0] = self.0;
            Ok(usize::from(self.0 <= 14))
        }
    }

    #[test]
    fn an_interruption_ends_no_sum() {
        let bytes = [2, 4, 6, 8, 10, 12, 14];
        assert_eq!(digest(Interrupted(0), &|_| ()).unwrap(), (7, Digest::of_bytes(&bytes)));
        assert_eq!(identity(Interrupted(0)).unwrap(), (7, Identity::of_bytes(&bytes)));
    }

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
