//! Puts a store into a bucket while it is built: parts under their final names as they are made, the manifest last.
//!
//! ```text
//! {"name":"web/00000/tokens-train-00000.arrow","bytes":5120,"digest":"..."}     a line of FOLDER.uploads
//! ```
//!
//! What is put is recorded before, next to the folder in which the store is built. Where a killed build is
//! resumed with other inputs, what it had put is removed: objects of that name, size and digest, as long as the place
//! has no manifest. Objects that are not recorded are never touched.

pub use super::objects::Upload;
pub use super::outputs::forget;
