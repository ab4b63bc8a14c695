//! A QMP monitor for tests.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread::JoinHandle;

use serde_json::{Value, json};

/// Serves one connection to the socket `path`. `answer` makes the answer to a command of this name,
/// if there is to be one. The thread returns the names of all commands when the connection ends.
pub(crate) fn serve(
    path: &Path,
    mut answer: impl FnMut(&str) -> Option<Value> + Send + 'static,
) -> JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 2 }, "package": "" });
        let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
        writeln!(stream, "{greeting}").unwrap();
        let mut commands = Vec::new();
        for line in BufReader::new(stream.try_clone().unwrap()).lines() {
            let line: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let command = line["execute"].as_str().unwrap().to_owned();
            if let Some(mut answer) = answer(&command) {
                answer["id"] = line["id"].clone();
                writeln!(stream, "{answer}").unwrap();
            }
            commands.push(command);
        }
        commands
    })
}
