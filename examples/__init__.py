"""Small programs that show weight sync at work; start reading at one_client.py."""
