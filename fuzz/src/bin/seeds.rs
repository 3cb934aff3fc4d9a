//! Writes the seeds of every target into a folder of its own: `farpage-fuzz-seeds DIR`.

use std::{env, fs, io, path::Path, process::ExitCode};

use farpage_fuzz::TARGETS;

fn main() -> ExitCode {
    let Some(dir) = env::args_os().nth(1) else {
        eprintln!("usage: farpage-fuzz-seeds DIR");
        return ExitCode::from(2);
    };
    match write(dir.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: cannot write to {}: {error}", dir.display());
            ExitCode::FAILURE
        }
    }
}

fn write(dir: &Path) -> io::Result<()> {
    for target in TARGETS {
        let own = dir.join(target.name);
        fs::create_dir_all(&own)?;
        for (number, seed) in (target.seeds)().into_iter().enumerate() {
            fs::write(own.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
