//! An in-memory bucket for tests, which may return objects with wrong bytes, as an undetected network error would.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Error, ErrorKind, Result, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Address, Doubts, LocalFile, Location, Object, Remote};

/// A bucket in memory.
#[derive(Default)]
pub struct Memory {
    objects: Mutex<BTreeMap<Address, Vec<u8>>>,
    /// If objects are returned with wrong bytes: those that no longer are.
    mended: Option<Mutex<BTreeSet<Address>>>,
    doubts: Doubts,
}

impl Memory {
    /// A bucket that returns objects with wrong bytes at both ends, until their local copies are dropped.
    pub fn spoiled() -> Self {
        Memory { mended: Some(Mutex::default()), ..Memory::default() }
    }

    /// The location of a URL in this bucket.
    ///
    /// # Panics
    ///
    /// If the URL is not a valid address.
    pub fn holding(self, url: &str) -> Location {
        let remote: Arc<dyn Remote> = Arc::new(self);
        Location::Object(Object::new(Address::parse(url).expect("an address"), remote))
    }

    fn objects(&self) -> MutexGuard<'_, BTreeMap<Address, Vec<u8>>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, object: &Address) -> Result<Vec<u8>> {
        self.objects().get(object).cloned().ok_or_else(|| Error::from(ErrorKind::NotFound))
    }

    /// The bytes of an object as they are returned.
    fn sent(&self, object: &Address) -> Result<Vec<u8>> {
        let mut bytes = self.get(object)?;
        let mended = self.mended.as_ref();
        let mended = mended.map(|one| one.lock().unwrap_or_else(PoisonError::into_inner));
        if mended.is_some_and(|mended| !mended.contains(object)) {
            bytes.first_mut().into_iter().for_each(|byte| *byte ^= 1);
            bytes.last_mut().into_iter().for_each(|byte| *byte ^= 2);
        }
        Ok(bytes)
    }
}

impl Remote for Memory {
    fn size(&self, object: &Address) -> Result<u64> {
        Ok(self.get(object)?.len() as u64)
    }

    fn read_at(&self, object: &Address, buffer: &mut [u8], offset: u64) -> Result<()> {
        let bytes = self.sent(object)?;
        let from = bytes.get(offset as usize..).and_then(|from| from.get(..buffer.len()));
        buffer.copy_from_slice(from.ok_or(ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn fetch(&self, object: &Address) -> Result<LocalFile> {
        // Readers recognize a compression by the file extension.
        let mut file = tempfile::Builder::new().suffix(object.name()).tempfile()?;
        file.write_all(&self.sent(object)?)?;
        let (_, path) = file.keep()?;
        Ok(LocalFile::copy(path.clone(), File::open(path)?))
    }

    fn version(&self, object: &Address) -> Result<String> {
        Ok(contract::Digest::of_bytes(&self.get(object)?).to_string())
    }

    fn forget(&self, object: &Address) -> bool {
        let mended = self.mended.as_ref();
        let mended = mended.map(|one| one.lock().unwrap_or_else(PoisonError::into_inner));
        mended.map(|mut mended| mended.insert(object.clone())).is_some()
    }

    fn doubts(&self) -> &Doubts {
        &self.doubts
    }

    fn create(&self, object: &Address, bytes: &[u8]) -> Result<()> {
        let mut all = self.objects();
        match all.get(object) {
            Some(found) if found != bytes => Err(ErrorKind::AlreadyExists.into()),
            _ => {
                all.insert(object.clone(), bytes.to_vec());
                Ok(())
            }
        }
    }

    fn sizes(&self, folder: &Address) -> Result<BTreeMap<String, u64>> {
        let below = folder.join("x").to_string();
        let below = below.strip_suffix('x').unwrap_or_default();
        let all = self.objects();
        let named = all.iter().map(|(name, bytes)| (name.to_string(), bytes.len() as u64));
        Ok(named
            .filter_map(|(name, size)| Some((name.strip_prefix(below)?.to_owned(), size)))
            .collect())
    }

    fn remove(&self, object: &Address) -> Result<()> {
        self.objects().remove(object);
        Ok(())
    }
}
