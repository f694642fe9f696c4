//! The model whose tokenizer is in the folder, as far as chats need it.

use std::path::Path;

use store::Location;

use crate::recipe::chat::{ChatFile, Paths, Rendered};

/// The files that may hold a chat template, newer convention first.
const FILES: [&str; 2] = ["chat_template.jinja", "tokenizer_config.json"];

/// A chat template next to the tokenizer that has its control tokens.
pub(super) struct Model {
    /// The name of its file.
    pub(super) file: &'static str,
    read: ChatFile,
}

impl Model {
    /// The model of a folder, if its files can be read.
    pub(super) fn of(folder: &Path) -> Option<Model> {
        if !folder.join("tokenizer.json").is_file() {
            return None;
        }
        let read = |file: &'static str| {
            let read = ChatFile::read(&Location::from(folder.join(file))).ok()?;
            Some(Model { file, read })
        };
        FILES.into_iter().find_map(read)
    }

    /// Its template for chats at `paths`; none if it needs a date, which only the user can choose.
    pub(super) fn rendered(&self, paths: Paths) -> Option<Rendered> {
        Rendered::new(paths, self.read.clone(), None).ok()
    }
}
