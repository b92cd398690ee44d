"""The federation without a network: messages, the party's rules and account, the server's rounds."""
