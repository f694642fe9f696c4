//! MosaicML Streaming's compressions and sums of shards.
//!
//! All compressions of release 0.13 of the package are supported, and the sums in use. A shard with another kind of sum
//! is refused, since it could not be checked.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use contract::{Fault, Result, counted};
use md5::Md5;
use serde::Deserialize;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;
use xxhash_rust::xxh64::xxh64;

use super::damaged;

/// A file of a shard, as the index names it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RawFile {
    pub(super) basename: String,
    pub(super) bytes: u64,
    #[serde(default)]
    pub(super) hashes: BTreeMap<String, String>,
}

impl RawFile {
    /// Whether its name is that of a file in the same folder.
    pub(super) fn is_beside(&self) -> bool {
        store::is_file_name(&self.basename)
    }
}

/// Snappy's compression ratio is below this.
const SNAPPY_RATIO_MAX: u64 = 22;

/// Decompresses a shard, of which `bytes` bytes are expected.
pub(super) fn unpacked(
    path: &Path,
    packed: &[u8],
    compression: Option<&str>,
    bytes: u64,
) -> Result<Vec<u8>> {
    let name = compression.unwrap_or("none");
    // One extra byte shows a wrong length without reading everything.
    let limit = bytes + 1;
    let mut data = Vec::new();
    // The level, after a colon, does not matter here.
    let read = match name.split(':').next() {
        Some("zstd") => zstd::Decoder::with_buffer(packed)
            .and_then(|decoder| decoder.take(limit).read_to_end(&mut data)),
        Some("gz") => {
            flate2::bufread::MultiGzDecoder::new(packed).take(limit).read_to_end(&mut data)
        }
        Some("br") => brotli::Decompressor::new(packed, 1 << 16).take(limit).read_to_end(&mut data),
        Some("bz2") => {
            bzip2::bufread::MultiBzDecoder::new(packed).take(limit).read_to_end(&mut data)
        }
        Some("snappy") => snappy(packed, bytes, &mut data),
        _ => {
            return Err(Fault::usage("shards of this compression are not read")
                .at(path.display().to_string())
                .found(name)
                .wanted("zstd, gz, br, bz2, snappy or none")
                .hint("decompress them next to their index: zdata then reads the plain file"));
        }
    };
    read.map_err(|error| damaged(path, format!("the compressed shard is damaged: {error}")))?;
    Ok(data)
}

/// Snappy is not a stream: the length comes first, and is trusted only if the data can hold that much.
fn snappy(packed: &[u8], bytes: u64, data: &mut Vec<u8>) -> io::Result<usize> {
    let wrong = |error: snap::Error| io::Error::new(ErrorKind::InvalidData, error.to_string());
    let length = snap::raw::decompress_len(packed).map_err(wrong)? as u64;
    if length != bytes || length > packed.len() as u64 * SNAPPY_RATIO_MAX {
        let what = format!("it says that it holds {length} bytes");
        return Err(io::Error::new(ErrorKind::InvalidData, what));
    }
    *data = snap::raw::Decoder::new().decompress_vec(packed).map_err(wrong)?;
    Ok(data.len())
}

/// Checks the bytes of a file against its index.
pub(super) fn check(path: &Path, data: &[u8], file: &RawFile) -> Result<()> {
    if data.len() as u64 != file.bytes {
        return Err(damaged(path, "the shard has another size than its index says")
            .found(counted(data.len(), "byte"))
            .wanted(format!("{}", file.bytes)));
    }
    for (kind, wanted) in &file.hashes {
        let Some(found) = sum(kind, data) else {
            return Err(Fault::usage("shards with a sum of this kind cannot be checked")
                .at(path.display().to_string())
                .found(kind)
                .wanted("md5, sha1, sha256, xxh64 or xxh128")
                .hint("take the sum out of index.json if it need not be checked"));
        };
        if found != *wanted {
            return Err(damaged(path, format!("the shard does not match its {kind}"))
                .found(found)
                .wanted(wanted));
        }
    }
    Ok(())
}

/// The sum of this kind as hexadecimal digits.
fn sum(kind: &str, data: &[u8]) -> Option<String> {
    fn hex<D: Digest>(data: &[u8]) -> String {
        D::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
    }
    Some(match kind {
        "md5" => hex::<Md5>(data),
        "sha1" => hex::<Sha1>(data),
        "sha256" => hex::<Sha256>(data),
        "xxh64" => format!("{:016x}", xxh64(data, 0)),
        "xxh128" | "xxh3_128" => format!("{:032x}", xxh3_128(data)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use contract::Class;

    use super::*;

    #[test]
    fn every_compression_comes_back_and_no_damage_passes() {
        let plain: Vec<u8> = (0..3000u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        let packed = |name: &str| match name {
            "zstd:7" => zstd::encode_all(&plain[..], 7).unwrap(),
            "gz" => {
                let mut gzip =
                    flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                gzip.write_all(&plain).unwrap();
                gzip.finish().unwrap()
            }
            "br:5" => {
                let mut brotli = brotli::CompressorWriter::new(Vec::new(), 4096, 5, 22);
                brotli.write_all(&plain).unwrap();
                brotli.into_inner()
            }
            "bz2" => {
                let mut bzip = bzip2::write::BzEncoder::new(Vec::new(), Default::default());
                bzip.write_all(&plain).unwrap();
                bzip.finish().unwrap()
            }
            _ => snap::raw::Encoder::new().compress_vec(&plain).unwrap(),
        };
        let path = Path::new("shard");
        for name in ["zstd:7", "gz", "br:5", "bz2", "snappy"] {
            let packed = packed(name);
            let unpack = |packed: &[u8], bytes| unpacked(path, packed, Some(name), bytes);
            assert_eq!(unpack(&packed, plain.len() as u64).unwrap(), plain, "{name}");
            for cut in 0..packed.len() {
                // A shard that is too short is refused by its size.
                let ok = match unpack(&packed[..cut], plain.len() as u64) {
                    Ok(data) => data.len() < plain.len(),
                    Err(fault) => fault.class() == Class::Data,
                };
                assert!(ok, "{name} to {cut}");
            }
            // A file with more content than its index says is read for one more byte only.
            let found = unpack(&packed, 100);
            assert!(found.is_err() || found.is_ok_and(|data| data.len() == 101), "{name}");
        }
        let fault = unpacked(path, b"", Some("lz4"), 0).unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        // A length of 4 GiB in five bytes.
        let fault = unpacked(path, &[0xff, 0xff, 0xff, 0xff, 0x0f], Some("snappy"), 0xffff_ffff);
        assert!(fault.unwrap_err().to_string().contains("4294967295"));
    }

    /// The sums of "abc" that the functions' authors published.
    #[test]
    fn sums_are_those_that_were_published() {
        for (kind, wanted) in [
            ("md5", "900150983cd24fb0d6963f7d28e17f72"),
            ("sha1", "a9993e364706816aba3e25717850c26c9cd0d89d"),
            ("sha256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            ("xxh64", "44bc2cf5ad770999"),
        ] {
            assert_eq!(sum(kind, b"abc").as_deref(), Some(wanted), "{kind}");
        }
        assert_eq!(sum("shake_128", b"abc"), None);
        let file = |kind: &str, sum: String| RawFile {
            basename: "shard".to_owned(),
            bytes: 3,
            hashes: [(kind.to_owned(), sum)].into(),
        };
        let check = |file| check(Path::new("shard"), b"abc", &file);
        for kind in ["md5", "sha1", "sha256", "xxh64", "xxh128"] {
            let right = sum(kind, b"abc").unwrap();
            check(file(kind, right.clone())).unwrap();
            let fault = check(file(kind, right.replace(&right[..1], "x"))).unwrap_err();
            assert!(fault.class() == Class::Data && fault.to_string().contains(kind), "{fault}");
        }
        assert_eq!(check(file("crc7", String::new())).unwrap_err().class(), Class::Usage);
    }
}
