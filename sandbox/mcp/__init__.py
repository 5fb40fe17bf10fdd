"""The MCP server: tools for a model, over HTTP or over standard input and output."""
