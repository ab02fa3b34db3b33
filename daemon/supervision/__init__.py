"""The processes of an instance: started, watched, started again, ended."""
