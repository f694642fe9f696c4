//! `ztrain import`.

use std::path::PathBuf;

use contract::{Result, counted, terminal};
use trainer::hf::import::import;

/// Arguments.
#[derive(clap::Args)]
#[command(
    after_help = "A curriculum begins with it by `init_from = \"FOLDER\"`; its [model] may then stay empty."
)]
pub(crate) struct Args {
    /// A folder in the layout of transformers' zaya, llama, qwen3, mixtral or qwen3_moe, or of Zyphra's first
    /// releases.
    #[arg(value_name = "HF_DIR", value_parser = super::local("copy the folder here first"))]
    source: PathBuf,
    /// The folder to make.
    #[arg(long, value_name = "FOLDER", value_parser = super::local("initial weights are read from this machine: name a folder"))]
    out: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Imports.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let imported = import(&args.source, &args.out)?;
    for note in &imported.notes {
        contract::note!("note: {note}");
    }
    let (tensors, layout) = (imported.tensors, imported.layout.name());
    let (skip, content) = (imported.start.config().skip.name(), imported.start.content());
    let out = args.out.display().to_string();
    let answer = serde_json::json!({
        "tensors": tensors, "layout": layout, "skip": skip, "content": content.to_string(),
        "init_from": out, "notes": imported.notes,
    });
    terminal::answer(args.json, &answer, || {
        let tensors = counted(tensors, "tensor");
        format!(
            "{tensors} in the layout of {layout} | skip = {skip:?} | content {content} | {out}\n"
        )
    })
    .map_err(|fault| fault.after(format_args!("{out} is made")))?;
    Ok(0)
}
