"""The protocol without a network: messages, the rules and the account of a party, and the rounds of the server."""
