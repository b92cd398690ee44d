"""The federation over Flower: records, apps, the server's side and a party's process."""
