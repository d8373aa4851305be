"""The torch engine: model, optimizer and step of one rank, their memory and time, and steps by a memory plan."""
