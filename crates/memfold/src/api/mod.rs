//! The daemon's interface: HTTP/JSON over a Unix socket.
