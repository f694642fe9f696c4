//! A bucket in memory, for tests: one that may hand out its objects with wrong bytes, as a network that errs unseen.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Error, ErrorKind, Result, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Address, LocalFile, Location, Object, Remote};

/// A bucket in memory.
#[derive(Default)]
pub struct Memory {
    objects: Mutex<BTreeMap<Address, Vec<u8>>>,
    /// Where objects come wrongly, those that do no more.
    mended: Option<Mutex<BTreeSet<Address>>>,
}

impl Memory {
    /// One whose objects come with wrong bytes at both ends, until what is kept of them is dropped.
    pub fn spoiled() -> Self {
        Memory { mended: Some(Mutex::default()), ..Memory::default() }
    }

    /// The place of a URL in this bucket.
    ///
    /// # Panics
    ///
    /// If the URL is no address.
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

    /// The same as it comes.
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
        // Readers know a compression by the end of a file name.
        let mut file = tempfile::Builder::new().suffix(object.name()).tempfile()?;
        file.write_all(&self.sent(object)?)?;
        let (_, path) = file.keep()?;
        Ok(LocalFile::copy(path.clone(), File::open(path)?))
    }

    fn forget(&self, object: &Address) -> bool {
        let mended = self.mended.as_ref();
        let mended = mended.map(|one| one.lock().unwrap_or_else(PoisonError::into_inner));
        mended.map(|mut mended| mended.insert(object.clone())).is_some()
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
