//! `cualloc completions` and `cualloc man`: files that a package installs along with the command.

use crate::options::{Cli, GlobalOptions};
use crate::{Failure, Outcome};
use clap::CommandFactory;
use clap_complete::Shell;
use std::io::Write;

pub fn completions(global: &GlobalOptions, shell: Shell) -> Outcome {
    refuse(global, "completions")?;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cualloc", &mut script);
    write(&script)
}

pub fn man(global: &GlobalOptions, page: Option<&str>) -> Outcome {
    refuse(global, "man")?;
    let mut command = Cli::command();
    command.build();
    let command = match page {
        None => command,
        Some(name) => match command.find_subcommand(name) {
            Some(found) => found.clone(),
            None => return Err(Failure::usage(format!("there is no subcommand `{name}`"))),
        },
    };
    let mut text = Vec::new();
    let title = command.get_display_name().unwrap_or("cualloc").to_owned();
    clap_mangen::Man::new(command)
        .title(title)
        .render(&mut text)?;
    write(&text)
}

fn refuse(global: &GlobalOptions, command: &str) -> Result<(), Failure> {
    let json = global.json.then_some("--json");
    match global.device_option().or(json) {
        Some(option) => Err(Failure::usage(format!("{option} is not for {command}"))),
        None => Ok(()),
    }
}

fn write(text: &[u8]) -> Outcome {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text)?;
    stdout.flush()?;
    Ok(true)
}
