//! `zdata`, the program: its allocator, and the commands of `zdata_cli`.

use std::path::PathBuf;
use std::process::ExitCode;

use allocator::ExitWithoutMemory;

#[global_allocator]
static ALLOCATOR: ExitWithoutMemory = ExitWithoutMemory;

fn main() -> ExitCode {
    ExitWithoutMemory::reserve_stack();
    ExitWithoutMemory::in_c_too();
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("zdata"));
    ExitCode::from(zdata_cli::main(program, std::env::args_os()))
}
