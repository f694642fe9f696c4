//! Communicators between GPUs, joined through the group that the ranks have already.
//!
//! State: compiled only. Where there is no RCCL or NCCL every rank hears so from every other, and nobody waits.

use rccl_sys::{Communicator, Library, UniqueId};

use crate::group::Group;
use crate::{Error, Result};

/// A communicator of all ranks of `group`: rank 0 names it, and hands the name on as bytes.
///
/// Joining has no deadline of its own; a rank that is lost meanwhile shows in the group's next exchange, not here. So it
/// is done once, early, after an exchange in which everybody said that the library is there.
pub fn communicator(group: &Group) -> Result<Communicator> {
    let foreign = |reason: String| Error::Foreign { call: "join a GPU communicator", reason };
    let mine = match (Library::open(), group.rank()) {
        (Err(reason), _) => reason.into_bytes(),
        (Ok(library), 0) => match library.unique_id() {
            Ok(id) => [&[0], &id.bytes[..]].concat(),
            Err(reason) => reason.into_bytes(),
        },
        (Ok(_), _) => vec![0],
    };
    let heard = group.all_gather("the naming of a GPU communicator", &mine)?;
    if let Some(rank) = heard.iter().position(|word| word.first() != Some(&0)) {
        let reason = String::from_utf8_lossy(&heard[rank]);
        return Err(foreign(format!("rank {rank}: {reason}")));
    }
    let bytes = heard[0][1..].try_into();
    let bytes = bytes.map_err(|_| foreign("rank 0 named it with the wrong length".to_owned()))?;
    Communicator::join(UniqueId { bytes }, group.rank(), group.world()).map_err(foreign)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::{Place, Store};
    use std::time::Duration;

    /// With one GPU or none there is no communicator of two ranks: what matters is that both are told, and neither waits.
    #[test]
    fn where_there_is_no_library_every_rank_is_told() {
        if Library::open().is_ok() {
            return;
        }
        let patience = Duration::from_secs(20);
        let store = Store::serve("127.0.0.1", 0, "test/", patience).unwrap();
        let port = store.port();
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                std::thread::spawn(move || {
                    let (host, name) = ("127.0.0.1".to_owned(), "test/".to_owned());
                    let (world, rank_0_serves, interface) = (2, false, String::new());
                    let node = String::new();
                    let place =
                        Place { rank, world, host, port, rank_0_serves, name, interface, node };
                    let group = Group::open(&place, patience).unwrap();
                    communicator(&group).err().unwrap().to_string()
                })
            })
            .collect();
        for rank in ranks {
            let said = rank.join().unwrap();
            assert!(said.contains("rank 0: none of librccl.so.1"), "{said}");
        }
    }
}
