//! The program from outside: its command line and its server.

#[cfg(test)]
mod bad_requests;
#[cfg(test)]
mod cli;
#[cfg(test)]
mod http;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod plan;
#[cfg(test)]
mod serve;
#[cfg(test)]
mod smollm2;
#[cfg(test)]
mod support;
